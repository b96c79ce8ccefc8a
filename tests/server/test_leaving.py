"""The ends of processes: children of the kernel leave its ranks alone, ranks that leave lose nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cells import cells
from conftest import living, poll

from nbdist import Session, in_ddp

CELLS = cells("server/cells/leaving.py")
ROOT = str(Path(__file__).parent.parent.parent)

# --------------------------------------------------------------------------------------------- children of the kernel

IN_SESSION = CELLS["in a session"]
#: Each starts an interpreter.
MORE = pytest.mark.long("more ways for a script to end")

CHILDREN = {
    name: CELLS[name] for name in ("fork", "multiprocessing", "a child that drops the session", "a child that calls it")
}


@contextlib.contextmanager
def script(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen([sys.executable, "script.py"], cwd=folder, env=env, text=True, stdout=subprocess.PIPE) as one:
        try:
            yield one
        finally:
            one.kill()


@pytest.mark.parametrize(
    "child",
    [pytest.param(code, id=name, marks=MORE if name.startswith("a child") else ()) for name, code in CHILDREN.items()],
)
def test_a_child_of_the_kernel_that_leaves(tmp_path: Path, child: str) -> None:
    code = IN_SESSION + child + "assert session.run_all(os.getpid) == pids\nprint('same')"
    with script(code, tmp_path) as kernel:
        out, _ = kernel.communicate()
    assert kernel.returncode == 0 and out.split()[-1:] == ["same"]


#: Children that live on; the last one is made behind Python's back, and holds all that the kernel has open.
LASTING = {
    "os.fork": "os.fork()",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)).start()",
    "in C": "import ctypes; ctypes.PyDLL(None).fork()",
}


@pytest.mark.parametrize("fork", LASTING.values(), ids=LASTING)
def test_ranks_end_with_the_kernel_though_a_child_of_it_lives(tmp_path: Path, fork: str) -> None:
    code = f"{IN_SESSION}{fork}\n" + CELLS["the kernel names its ranks"]
    with script(code, tmp_path) as kernel:
        assert kernel.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
        assert len(ranks) == 2
        others = set(psutil.Process(kernel.pid).children()) - {ranks[0].parent()}
        try:
            assert len(others) == 1
            kernel.kill()
            assert poll(lambda: not living(ranks)), "they outlive the kernel"
            assert living(others)
        finally:
            for other in others:
                other.kill()


# ------------------------------------------------------------------------------------------ ranks leave in good order


def leaves(folder: str) -> None:
    import atexit
    import concurrent.futures
    import multiprocessing.util
    import threading
    import weakref

    import __main__

    def touch(name: str) -> None:
        Path(folder, name).write_text("tail")

    kept = __main__.kept = threading.Event()
    __main__.files = [open(f"{folder}/text", "w"), open(f"{folder}/binary", "wb")]  # noqa: SIM115
    __main__.files[0].write("tail")
    __main__.files[1].write(b"tail")
    atexit.register(touch, "atexit")
    multiprocessing.util.Finalize(None, touch, args=("multiprocessing",), exitpriority=1)
    weakref.finalize(kept, touch, "finalize")
    threading.Timer(0.2, touch, ["thread"]).start()
    __main__.pool = concurrent.futures.ThreadPoolExecutor(1)
    __main__.pool.submit(time.sleep, 0.2)
    __main__.pool.submit(touch, "pool")


EVERYTHING = {name: "tail" for name in ("text", "binary", "atexit", "multiprocessing", "finalize", "thread", "pool")}


def left(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != "script.py"}


@pytest.mark.parametrize("how", ["in_ddp", "close", "restart", "drop"])
def test_a_rank_that_leaves_loses_nothing(tmp_path: Path, how: str) -> None:
    if how == "in_ddp":
        in_ddp(1, leaves, str(tmp_path))
    else:
        session = Session(1)
        session.run(leaves, str(tmp_path))
        if how == "restart":
            session.restart()
            assert left(tmp_path) == EVERYTHING
        if how != "drop":
            session.close()
        del session
    assert left(tmp_path) == EVERYTHING


#: The last one registers ends of sessions and processes before nbdist does.
FIRST = {"nbdist": "", "torch": "import torch, multiprocessing.util, weakref\nweakref.finalize(torch, print)\n"}


@pytest.mark.long("more ways for a kernel to end")
@pytest.mark.started
@pytest.mark.parametrize(
    "first", [pytest.param(FIRST["nbdist"], marks=MORE, id="nbdist"), pytest.param(FIRST["torch"], id="torch")]
)
def test_ranks_lose_nothing_when_the_kernel_ends(tmp_path: Path, first: str) -> None:
    code = (
        first
        + f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r}); sys.path.insert(0, {ROOT + '/tests'!r})\n"
    )
    code += f"from test_leaving import *\nsession = Session(1)\nsession.run(leaves, {str(tmp_path)!r})\n"
    with script(code, tmp_path) as kernel:
        assert kernel.wait() == 0
    assert left(tmp_path) == EVERYTHING


def test_a_rank_that_raised_loses_nothing(tmp_path: Path) -> None:
    def raises() -> None:
        leaves(str(tmp_path))
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        in_ddp(1, raises)
    assert left(tmp_path) == EVERYTHING


def hangs(deaf: bool) -> None:
    import atexit

    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    atexit.register(time.sleep, 1000)


def test_a_rank_that_hangs_while_it_leaves() -> None:
    pids: list[int] = []
    with Session(1) as session:
        pids += session.run_all(os.getpid)
        session.run(hangs, True)
    assert not psutil.pid_exists(pids[0]), "it was waited for, and would have taken longer than a test may"


def forks_and_writes(folder: str) -> None:
    import __main__

    __main__.file = open(f"{folder}/text", "w")  # noqa: SIM115
    __main__.file.write("once")
    if os.fork() == 0:
        return
    os.wait()


def test_a_process_that_the_function_forks_writes_nothing_twice(tmp_path: Path) -> None:
    in_ddp(1, forks_and_writes, str(tmp_path))
    assert left(tmp_path) == {"text": "once"}

"""Imports in the server that hang or crash: no other session loses its ranks, and all ends with the kernel."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import living, poll

from nbdist import RankDied, Session, in_ddp, parallel_map
from nbdist.capture.modules import own_file
from nbdist.engines import forkserver
from nbdist.kernel.cell.cell import Cell
from nbdist.system.source_files import package_of
from nbdist.wire.forking import BREAK_OFF


@pytest.fixture
def spared() -> Iterator[Session]:
    """A session that must not notice."""
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        yield session
        assert session.run(total) == 2.0 and session.run_all(os.getpid) == pids


def total() -> float:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def load_in_server(code: str, name: str, folder: Path) -> None:
    """Have the server import a module, as `ForkServer.preload` does with an installed one."""
    (folder / f"{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(forkserver, "installed", lambda name: True)
        forkserver.server().preload([name])


@pytest.mark.parametrize("folder", [".local/lib/python3/site-packages", "usr/lib/python3/dist-packages"])
def test_packages_of_the_user_and_of_the_system_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """`pip install --user` and Debian's packages lie outside the environment, and do not change meanwhile either."""
    place, name = tmp_path / folder, f"a_package_in_{folder.replace('/', '_').strip('.')}".replace("-", "_")
    place.mkdir(parents=True)
    place.joinpath(f"{name}.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(place)
    server = forkserver.server().process.pid
    assert in_ddp(1, lambda: sys.modules[name].PID, imports=f"import {name}") == server
    assert own_file(importlib.import_module(name), name) is None and package_of(str(place / f"{name}.py")) == name


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("crashes_at_import", "import ctypes\nctypes.string_at(0)\n"),
        ("leaves_at_import", "import os\nos._exit(3)\n"),
        ("leaves_well", "import os\nos._exit(0)\n"),
        ("aborts_at_import", "import os\nos.abort()\n"),
    ],
)
def test_a_module_that_ends_the_process_which_imports_it(spared: Session, tmp_path: Path, name: str, code: str) -> None:
    before = forkserver.server().process.pid
    load_in_server(code, name, tmp_path)
    assert in_ddp(2, total) == 2.0 and forkserver.server().process.pid == before


@pytest.mark.parametrize(
    ("ends", "why"), [("abort()", "was killed by SIGABRT"), ("_exit(3)", "ended with exit code 3")]
)
def test_the_first_ranks_name_the_module_that_ended_the_server(tmp_path: Path, ends: str, why: str) -> None:
    forkserver.stop()  # one without ranks imports for itself
    asked, name = tmp_path / "asked", f"ends_by_{ends[:-2].strip('_(')}"
    load_in_server(
        f"import os, time\nwhile not os.path.exists({str(asked)!r}): time.sleep(0.01)\nos.{ends}\n", name, tmp_path
    )
    with Session(1) as session:
        future = session.submit(total)
        assert poll(lambda: forkserver.server()._last_launch >= 0)
        asked.touch()
        with pytest.raises(RankDied, match=f"never started: the fork server {why}.* while it imported one of {name}, "):
            future.result()
    assert in_ddp(1, total) == 1.0


@pytest.mark.parametrize("others", [False, True])
def test_an_import_that_hangs_is_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    monkeypatch.setattr(forkserver, "_LONG_IMPORT", 0.0)
    forkserver.stop()  # one without ranks of other tests
    with Session(2) as session:
        if others:
            pids = session.run_all(os.getpid)
        else:
            forkserver.server()
        used, begun, name = forkserver.server(), tmp_path / "begun", f"hangs_at_import_{others}"
        load_in_server(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(100000)\n", name, tmp_path)
        assert poll(begun.exists)
        used.break_off()
        assert in_ddp(2, total) == 2.0 and forkserver.server() is used
        if others:
            assert session.run_all(os.getpid) == pids
    used.break_off()  # when nothing is imported, it does nothing
    assert in_ddp(2, total) == 2.0


def test_a_map_whose_workers_wait_for_an_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    go = tmp_path / "go"

    def notice(self: Cell, text: str) -> None:
        said.append(text)
        go.touch()

    monkeypatch.setattr(Cell, "notice", notice)
    monkeypatch.setattr("nbdist.kernel.calls.notices.LONG_START", 0.0)
    forkserver.stop()  # one without ranks imports for itself
    code = f"import os, time\nfor _ in range(3000):\n    os.path.exists({str(go)!r}) or time.sleep(0.01)\n"
    load_in_server(code, "imported_for_long", tmp_path)
    assert parallel_map(abs, [-1], 1, progress=False) == [1]
    assert said[0].startswith("no ranks after 0 s: the fork server imports") and "imported_for_long" in said[0]


def test_the_kernel_ends_while_the_server_imports(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "hangs.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(100000)\n")
    pid = os.fork()
    if pid == 0:
        try:
            session = Session(2)
            session.run(total)
            forkserver.server().ask("preload", ["hangs"], [*sys.path, str(tmp_path)])
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert poll(begun.exists)
        family = psutil.Process(pid).children(recursive=True)
        assert len(family) >= 3
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert poll(lambda: not living(family)), family


def test_ranks_may_use_that_signal_themselves() -> None:
    assert in_ddp(2, lambda: signal.getsignal(BREAK_OFF)) == signal.SIG_DFL

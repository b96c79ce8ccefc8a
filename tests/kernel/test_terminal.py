"""Ctrl-C in a terminal, a restarted kernel, scripts that are killed or forget their session: nothing is left."""

from __future__ import annotations

import gc
import os
import pty
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from cells import cells
from conftest import Kernel, left_in_shared_memory, living, open_fds, poll, ranks_of, shared_memory_names

from nbdist import Session, in_ddp

ROOT = str(Path(__file__).parent.parent.parent)

CELLS = cells("kernel/cells/terminal.py")
#: Each starts a kernel.
MORE = pytest.mark.long("more ways for a kernel to end")


def write(folder: Path, code: str) -> Path:
    script = folder / "script.py"
    script.write_text(CELLS["prelude"] + '\nif __name__ == "__main__":\n' + textwrap.indent(code, "    "))
    return script


@contextmanager
def script(folder: Path, code: str, terminal: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A script in a process group of its own, as a shell starts it, or in a session with its own terminal."""
    before = shared_memory_names()

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, str(write(folder, code))],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=subprocess.DEVNULL if terminal is None else terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=None if terminal is None else take_terminal,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert not left_in_shared_memory(before)


def began(folder: Path, process: subprocess.Popen[str], ranks: int = 2) -> list[psutil.Process]:
    """Wait until all ranks work; the fork server and everything below it."""
    assert poll(lambda: all((folder / f"began{rank}").exists() for rank in range(ranks)) or process.poll())
    assert process.poll() is None, process.communicate()[0]
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 1 + ranks
    return family


def cleaned(folder: Path) -> list[bool]:
    return [(folder / f"cleaned{rank}").exists() for rank in range(2)]


def test_ctrl_c_typed_at_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with script(tmp_path, CELLS["catches an interrupt"], terminal=theirs) as process:
            family = began(tmp_path, process)
            os.write(ours, b"\x03")
            output = process.communicate()[0]
            assert output == "interrupted True True\nagain 2\n" and process.returncode == 0
            assert poll(lambda: not living(family))
    finally:
        os.close(ours)
        os.close(theirs)


def test_interrupt_of_the_process_group(tmp_path: Path) -> None:
    """Without a handler in the script: it ends as any script does, with the ranks' traceback."""
    with script(tmp_path, "in_ddp(2, work)") as process:
        family = began(tmp_path, process)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate()[0]
        assert process.returncode == -signal.SIGINT
        assert output.rstrip().endswith("KeyboardInterrupt") and ", in work\n" in output
        assert cleaned(tmp_path) == [True, True]
        assert poll(lambda: not living(family))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_script_that_is_killed(tmp_path: Path, name: str) -> None:
    with script(tmp_path, "in_ddp(2, work)") as process:
        family = began(tmp_path, process)
        process.send_signal(getattr(signal, name))
        assert poll(lambda: not living(family)), living(family)


@pytest.mark.parametrize(
    "end",
    ["pass", "sys.exit(3)", "1 / 0", "os._exit(4)", "gc = __import__('gc'); gc.disable()"],
    ids=["runs out", "sys.exit", "raises", "os._exit", "without the collector"],
)
def test_a_script_that_forgets_its_session(tmp_path: Path, end: str) -> None:
    with script(tmp_path, CELLS["forgets its session"] + end) as process:
        output = process.communicate()[0]
        pids = [int(pid) for pid in output.splitlines()[0].split()[:2]]
        assert process.returncode == {"sys.exit(3)": 3, "1 / 0": 1, "os._exit(4)": 4}.get(end, 0), output
        assert poll(lambda: not any(map(psutil.pid_exists, pids)))
        assert poll(lambda: not [p for p in psutil.process_iter() if is_ours(p, tmp_path)])


def is_ours(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_script_that_leaves_a_thread_training(tmp_path: Path) -> None:
    with script(tmp_path, CELLS["leaves a thread training"]) as process:
        process.communicate()
        assert poll(lambda: not [p for p in psutil.process_iter() if is_ours(p, tmp_path)])


# ------------------------------------------------------------------------------------------ sessions in this process


def test_a_session_that_is_collected() -> None:
    in_ddp(2, int)
    fds = open_fds()
    session = Session(2)
    session.run(int)
    assert len(ranks_of()) == 2
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    assert poll(lambda: not ranks_of())
    assert open_fds() <= fds


def test_a_session_in_a_cycle() -> None:
    in_ddp(2, int)
    fds = open_fds()
    cycle: list[object] = [Session(2)]
    cycle.append(cycle)
    cycle[0].run(int)  # type: ignore[attr-defined]
    del cycle
    gc.collect()
    assert poll(lambda: not ranks_of()) and open_fds() <= fds


# ----------------------------------------------------------------------------------------------- a kernel restarted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("busy", "now"),
    [
        pytest.param(True, True, id="in a call, at once"),
        pytest.param(False, False, id="idle, asked to leave", marks=MORE),
        pytest.param(True, False, id="in a call, asked to leave", marks=MORE),
        pytest.param(False, True, id="idle, at once", marks=MORE),
    ],
)
def test_restarted_kernel(tmp_path: Path, now: bool, busy: bool) -> None:
    before, temporary = shared_memory_names(), tmp_path / "temporary"
    temporary.mkdir()
    kernel = Kernel(tmp_path, env={"TMPDIR": str(temporary)})
    try:
        kernel.ok(CELLS["prelude"])
        if busy:
            kernel.start("in_ddp(2, work)")
            assert poll(lambda: (tmp_path / "began0").exists() and (tmp_path / "began1").exists())
        else:
            kernel.ok("session = Session(2)\nsession.run(os.system, 'sleep 300 &')")
        family = psutil.Process(kernel.pid).children(recursive=True)
        assert len(family) >= 3
        kernel.manager.restart_kernel(now=now)
        assert poll(lambda: not living(family)), living(family)
        kernel.client.wait_for_ready()
        kernel.ok(CELLS["prelude"])
        assert kernel.ok("print(in_ddp(2, dist.get_world_size))").text == "2\n"
        assert not left_in_shared_memory(before)
        assert not [path for path in temporary.rglob("*") if "nbdist" in path.name]
    finally:
        kernel.close()

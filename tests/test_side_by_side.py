"""Sessions, notebooks and test runs of one user at the same time: none notices what befalls another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest
from cells import cells
from conftest import Kernel, poll

from nbdist import NbdistError, Session

CELLS = cells("cells/side_by_side.py")
#: In a notebook: a session whose calls must come back right, all from the same ranks.
STEADY = CELLS["steady"]
#: Everything that may go wrong in another.
TROUBLED = CELLS["in trouble"]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Kernel]:
    """A second notebook."""
    folder = tmp_path / "other"
    folder.mkdir()
    kernel = Kernel(folder)
    try:
        yield kernel
    finally:
        kernel.close()


def meanwhile(trouble: Callable[[], object], steady: Callable[[], object]) -> None:
    """Run `steady` several times a second, until `trouble` has ended in another thread."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(trouble)
        while not wait([future], timeout=0.2).done:
            steady()
        future.result()
    steady()


@pytest.mark.long("other test runs")
def test_a_session_works_while_another_fails() -> None:
    def trouble() -> None:
        for fault in (kill, leave, throw) * 2:
            with Session(2) as session, pytest.raises((NbdistError, ZeroDivisionError)):
                session.run(fault)

    with Session(2) as session:
        pids = session.run_all(os.getpid)

        def steady() -> None:
            assert session.run_all(os.getpid) == pids

        meanwhile(trouble, steady)


@pytest.mark.long("other test runs")
def test_a_notebook_works_while_another_fails(kernel: Kernel, other: Kernel) -> None:
    kernel.ok(STEADY)
    other.ok(TROUBLED)
    # Clients of two kernels cannot be waited for by two threads before jupyter_client 8.
    cell = other.start("try:\n    trouble()\nfinally:\n    open('over', 'w').close()")
    meanwhile(lambda: poll((other.cwd / "over").exists), lambda: kernel.ok("steady(20)"))
    assert other.finish(cell).error is None
    meanwhile(psutil.Process(other.pid).kill, lambda: kernel.ok("steady(20)"))
    kernel.ok("session.close()")


@pytest.mark.long("other test runs")
def test_a_notebook_works_during_a_test_run(kernel: Kernel, tmp_path: Path) -> None:
    """`pytest -n 2` with ranks of its own; some of them fail."""
    (tmp_path / "test_in_ranks.py").write_text(
        "import os, pytest, torch, torch.distributed as dist\n"
        "from nbdist import RankDied\n"
        "def sums():\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    return total.item()\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_in_ranks(ddp, number):\n"
        "    if number % 3 == 2:\n"
        "        with pytest.raises(RankDied):\n"
        "            ddp(2, os._exit, 3)\n"
        "    assert ddp(2, sums) == 2.0\n"
    )
    kernel.ok(STEADY)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "test_in_ranks.py"]

    def tests() -> None:
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
        assert "6 passed" in done.stdout, done.stdout

    meanwhile(tests, lambda: kernel.ok("steady(20)"))
    kernel.ok("session.close()")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def throw() -> None:
    raise ZeroDivisionError

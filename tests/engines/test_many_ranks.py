"""Many ranks on one machine: what costs little with two ranks must not cost the session with many."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from calls import boom, on, sums
from cells import cells
from conftest import poll

from nbdist import Session
from nbdist.rank.world import environ
from nbdist.system.connections import sockets
from nbdist.wire import stacks
from nbdist.wire.messages import Slot, World
from nbdist.wire.rendezvous import RendezvousAddress

pytestmark = pytest.mark.slow

MANY = 64
ROOT = str(Path(__file__).parent.parent.parent)


@pytest.mark.long("many ranks")
def test_a_failure_leaves_the_same_ranks_however_many_there_are() -> None:
    with Session(MANY) as session:
        pids = session.run_all(os.getpid)
        for _ in range(2):
            with pytest.raises(ValueError, match="boom"):
                session.run(on, 1, boom, sums)
            assert session.run(sums) == float(MANY) and session.run_all(os.getpid) == pids


def connected() -> int:
    """With how many processes this one has connections."""
    return len({one.raddr for one in sockets(psutil.Process()) if one.status == psutil.CONN_ESTABLISHED})


@pytest.mark.long("many ranks")
def test_ranks_that_connect_late_have_few_connections_and_fail_as_others_do() -> None:
    def from_now_on() -> None:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        dist.destroy_process_group()  # the next call makes a new one

    with Session(32) as session:
        assert min(session.run_all(connected)) >= 31
        session.run(from_now_on)
        pids = session.run_all(os.getpid)
        assert max(session.run_all(connected)) <= 2 * 5, "those 1, 2, 4, 8 and 16 away"
        for _ in range(2):
            with pytest.raises(ValueError, match="boom"):
                session.run(on, 1, boom, sums)
            assert session.run_all(os.getpid) == pids
        assert session.run(sums) == 32.0


def test_many_ranks_connect_late_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, address = Slot(0, 0, 1, "lo", 1, ()), RendezvousAddress("127.0.0.1", 1, 0)

    def variable(ranks: int) -> str | None:
        return environ(World(0, ranks, "cpu", "gloo", slot, address, threads=1)).get("TORCH_GLOO_LAZY_INIT")

    assert (variable(16), variable(1000)) == (None, "1")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert variable(1000) == "0"


def limited(tmp_path: Path, ranks: int, soft: int, hard: int) -> list[str]:
    """Return the output of a script that starts 4 ranks and then more, under limits of open files."""
    script = tmp_path / "script.py"
    script.write_text(cells("engines/cells/many_ranks.py")["limited"])
    shell = f"ulimit -Sn {soft}; ulimit -Hn {hard}; exec {sys.executable} {script} {ranks}"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.long("many ranks")
def test_the_limit_of_open_files_is_raised_where_ranks_need_more(tmp_path: Path) -> None:
    few, many = limited(tmp_path, MANY, 256, 2000)
    assert few == "4.0 256 256", "nothing is raised where there is no need"
    assert many == f"{MANY}.0 2000 2000"


@pytest.mark.long("many ranks")
def test_below_the_hard_limit_the_error_says_how_many_ranks_fit(tmp_path: Path) -> None:
    few, many = limited(tmp_path, MANY, 200, 200)
    assert few == "4.0 200 200"
    found = re.match(rf"NbdistError {MANY} ranks need \d+ open files.* (\d+) ranks fit", many)
    assert found, many
    fits = int(found[1])
    assert 10 < fits < MANY
    assert limited(tmp_path, fits, 200, 200)[1] == f"{fits}.0 200 200"


def test_silent_ranks_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, all_wait = stacks.ask, threading.Barrier(8, timeout=500)  # threads that waited forever could not be ended

    def ask_all(sock: socket.socket, number: int, send_signal: Callable[[], None]) -> str:
        """A question that is not answered, and goes on when none of the eight is."""
        return ask(sock, number, lambda: (all_wait.wait(), send_signal())[1])

    with Session(8) as session:
        pids = session.run_all(os.getpid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert poll(lambda: {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED})
            with monkeypatch.context() as patch:
                patch.setattr(stacks, "ask", ask_all)
                assert session.stacks().count("does not answer") == 8
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert session.run(sums) == 8.0
        assert poll(lambda: session.stacks().count("waits for a call") == 8), session.stacks()


def test_the_memory_of_many_ranks_is_looked_at_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(process: psutil.Process) -> SimpleNamespace:
        looks.append(process.pid)
        return SimpleNamespace(uss=10**6)

    monkeypatch.setattr(psutil.Process, "memory_full_info", look)
    with Session(20) as session:
        pids = session.run_all(os.getpid)
        for seen in (pids, pids[:16], [*pids[16:], *pids[:12]]):
            looks.clear()
            assert str(session.status()).count("1.0 MB") == 20 and looks == seen

"""Errors in the fork server end the launch that they belong to, and no other session."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from calls import sums
from cells import cells
from conftest import living, open_fds, poll

from nbdist import RankDied, Session, in_ddp
from nbdist.engines import forkserver

#: In the server: one of its next forks fails.
FAILING_FORK = cells("server/cells/spared.py")["a fork fails"]
#: Costs the ranks of a session.
MORE = pytest.mark.long("more ways for a rank to fail")


@pytest.fixture
def spared() -> Iterator[Session]:
    """A session that must not notice."""
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        yield session
        assert session.run(sums) == 2.0 and session.run_all(os.getpid) == pids


def server() -> psutil.Process:
    return psutil.Process(forkserver.server().process.pid)


def load_in_server(code: str, name: str, folder: Path) -> None:
    (folder / f"{name}.py").write_text(code)
    forkserver.server().ask("preload", [name], [*sys.path, str(folder)])


@pytest.mark.parametrize("fork_at", [1, 2])
def test_a_fork_that_fails(spared: Session, tmp_path: Path, fork_at: int) -> None:
    load_in_server(f"fork_at = {fork_at}\n{FAILING_FORK}", f"failing_{fork_at}", tmp_path)
    said = rf"rank {fork_at - 1} could not be started: Resource temporarily unavailable: .*limit of processes"
    with pytest.raises(RankDied, match=said):
        in_ddp(2, sums)
    assert in_ddp(2, sums) == 2.0


def test_a_server_out_of_descriptors(spared: Session) -> None:
    process = server()
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    fds = open_fds()
    for more in range(4):  # a rank needs four descriptors
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + more, limits[1]))
        try:
            assert in_ddp(2, sums) == 2.0 and more  # with some left ranks start, and raise their own limit
        except (RankDied, OSError) as exc:
            assert re.search("ulimit -n|Too many open files", str(exc))
        finally:
            process.rlimit(resource.RLIMIT_NOFILE, limits)
    assert in_ddp(2, sums) == 2.0
    assert poll(lambda: open_fds() <= fds)


def send_raw(body: bytes) -> None:
    forkserver.server().control.sock.sendall(struct.pack("<QI", len(body), 0) + body)


def test_requests_that_make_no_sense(spared: Session) -> None:
    before = server().pid
    forkserver.server().ask("nonsense", 1)
    forkserver.server().ask("fork")
    forkserver.server().ask("abandon", 10**9, 1)
    send_raw(b"no pickle")
    assert in_ddp(2, sums) == 2.0 and server().pid == before


def test_a_module_that_exits_when_it_is_imported(spared: Session, tmp_path: Path) -> None:
    before = server().pid
    load_in_server("import sys\nsys.exit(5)", "exits_at_import", tmp_path)
    assert in_ddp(2, sums) == 2.0 and server().pid == before


# ------------------------------------------------------------------------------------------------- deaths are noticed


def test_a_server_killed_between_two_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    ask = forkserver.ForkServer.ask

    def began() -> bool:
        """Return whether the first rank is there, and holds the server's end of the connection no more."""
        outputs = [os.readlink(f"/proc/{one.pid}/fd/1") for one in (server(), *server().children())]
        return len(set(outputs)) > 1

    def ask_and_kill(self: forkserver.ForkServer, *request: Any, **parts: Any) -> None:
        ask(self, *request, **parts)
        if request[0] == "fork" and not killed:
            assert poll(began)
            killed.append(self.process.pid)
            self.process.kill()
            self.process.wait()

    assert in_ddp(2, sums) == 2.0
    monkeypatch.setattr(forkserver.ForkServer, "ask", ask_and_kill)
    with Session(2) as session:
        assert session.run(sums) == 2.0 and killed


def test_a_server_that_is_killed_before_it_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = forkserver.ForkServer.ask

    def ask_and_kill(self: forkserver.ForkServer, *request: Any, **parts: Any) -> None:
        if request[0] == "launch":
            os.kill(self.process.pid, signal.SIGSTOP)
        ask(self, *request, **parts)
        if request[0] == "fork" and request[2] == 1:
            monkeypatch.undo()
            self.process.kill()

    assert in_ddp(2, sums) == 2.0
    monkeypatch.setattr(forkserver.ForkServer, "ask", ask_and_kill)
    with Session(2) as session, pytest.raises(RankDied, match="never started"):
        session.run(sums)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only on Linux the kernel sees a rank end by itself")
def test_a_rank_dies_while_the_server_hangs() -> None:
    """The server is resumed only when the call has ended: one that waited for its word would wait forever."""
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        stopped = server()
        stopped.suspend()
        try:
            with pytest.raises(RankDied, match=r"rank 1 \(pid .*SIGKILL") as caught:
                session.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() else sums())
            assert caught.value.status == -signal.SIGKILL and caught.value.pid == pids[1]
        finally:
            stopped.resume()
        session.restart()
        assert session.run(sums) == 2.0


def test_a_rank_that_closes_its_connection() -> None:
    def closes() -> None:
        if dist.get_rank() == 1:
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family == socket.AF_UNIX:
                        os.close(fd)
            time.sleep(1000)
        sums()

    with Session(2) as session, pytest.raises(RankDied, match=r"rank 1 .*closed its connection"):
        session.run(closes)


def test_a_rank_that_becomes_another_program() -> None:
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with pytest.raises(RankDied, match=r"rank \d .*closed its connection"):
            session.run(lambda: os.execv("/bin/sleep", ["sleep", "100000"]))
        session.restart()
        assert session.run(sums) == 2.0
        assert poll(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_rank_that_spoils_its_interpreter() -> None:
    def spoil() -> int:
        import builtins

        for module, name in ((builtins, "print"), (sys, "stdout"), (sys, "stderr")):
            setattr(module, name, None)
        sys.path.clear()
        os.chdir("/")
        os.umask(0o777)
        return 1

    with Session(2) as session:
        assert session.run(spoil) == 1
        assert session.run(sums) == 2.0


def spoil_join() -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("cannot join")

    dist.destroy_process_group()
    dist.init_process_group = fail


def die_at_join() -> None:
    dist.destroy_process_group()
    dist.init_process_group = lambda *args, **kwargs: os._exit(9)


@pytest.mark.parametrize(
    ("spoil", "error"), [(spoil_join, "cannot join"), pytest.param(die_at_join, "exit code 9", marks=MORE)]
)
def test_a_rank_that_is_not_asked_cannot_join(spoil: Any, error: str) -> None:
    with Session(2) as session:
        session.call(spoil, ranks=[1])
        with pytest.raises((ValueError, RankDied), match=error) as caught:
            session.call(sums, ranks=[0])
        assert "rank 1" in f"{caught.value} {caught.value.__cause__}"
        if spoil is die_at_join:
            session.restart()
        assert session.run(sums) == 2.0
    assert poll(lambda: not living(server().children()))

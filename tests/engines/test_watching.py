"""Ranks of this machine are watched through the fork server's reports, and directly."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from conftest import poll

from nbdist.engines import watching
from nbdist.engines.contract import Exit
from nbdist.wire.forking import REPORT, STARTED


def test_signals_go_by_pid_where_a_sandbox_refuses_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse, raising=False)
    process = subprocess.Popen(["sleep", "1000"])
    watch = watching.Watch(1)
    try:
        watch.pids[0] = process.pid
        watch._processes[0] = os.open(os.devnull, os.O_RDONLY)
        watch.signal(0, signal.SIGTERM)
        assert poll(lambda: process.poll() == -signal.SIGTERM)
    finally:
        process.kill()
        os.close(watch._processes.pop(0))
        watch.close()


def test_a_rank_that_ended_before_it_was_watched() -> None:
    """The fork server's report of the end may come later than the question: it has reaped the process before."""
    process = subprocess.Popen(["true"])
    process.wait()
    watch = watching.Watch(1)
    try:
        os.write(watch.report, REPORT.pack(0, process.pid, STARTED))
        assert watch.exits() == [Exit(0, None)] and not watch.alive
    finally:
        watch.close()

"""Processes that ranks leave behind: the server finds and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

import psutil


def end_leftovers(ended: Collection[int], others: Collection[int]) -> None:
    """Kill the processes that ended ranks have started: their process groups and sessions, and all orphans if no other
    ranks are left."""
    for rank_pid in ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank_pid, signal.SIGKILL)
    for orphan in set(_children()) - set(others):  # what has lost its parent is this process's child
        with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's since it was started by sudo
            if not others or os.getsid(orphan) in ended:
                process = psutil.Process(orphan)
                for child in (*process.children(recursive=True), process):
                    child.kill()


def end_all() -> None:
    """Kill every descendant of this process, including those that start meanwhile."""
    for _ in range(100):
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def _children() -> list[int]:
    """Return the pids of this process's children, zombies included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # no Linux. psutil reads all of /proc for this, at ten times the cost of a rank's exit
        return [child.pid for child in psutil.Process().children()]

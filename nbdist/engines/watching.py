"""Watching the ranks of this machine: reports of the fork server, and the processes themselves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

from ..deaths import NEVER_STARTED, NOT_OURS, not_started
from ..system.processes import exists, exit_status, open_pidfd, redirect_to_devnull, register_after_fork
from ..wire.channel import readable
from ..wire.forking import REPORT, STARTED
from .contract import Exit

#: Seconds that the fork server may take to report the end of a rank: it does so at once, unless it imports or hangs, or
#: the machine is busy. Without the report, the exit code is unknown where the system does not show it.
_DELAY = 1.0


class Watch:
    """The starts and ends of the ranks of one launch.

    The fork server reports them at `report`. It may hang or be killed, so each process is also watched directly, if the
    system allows it (Linux 5.3). A process that is forked from this one has no ranks.

    Attributes: `pids`, by rank, None before it has started; `alive`, the ranks that have not ended as far as is known;
    `fd`, readable when there is something to report.
    """

    def __init__(self, size: int) -> None:
        self.pids: list[int | None] = [None] * size
        self.alive = set(range(size))
        self.on_start: Callable[[], None] = lambda: None
        """Called when the fork server has reported the start of a rank."""
        self.why_lost: Callable[[], str] = lambda: NEVER_STARTED
        """Returns the reason why a rank was never started, once the fork server is gone."""
        self._not_ours: list[Exit] = []
        self._processes: dict[int, int] = {}  # rank → descriptor
        self._reports, self.report = os.pipe()
        os.set_blocking(self._reports, False)
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        self.fd = self._reports
        if self._poll is not None:
            self.fd = self._poll.fileno()
            self._poll.register(self._reports, select.EPOLLIN)
        register_after_fork(self)

    def after_fork(self) -> None:
        self._not_ours = [Exit(rank, None, NOT_OURS) for rank in sorted(self.alive)]
        self.alive.clear()
        redirect_to_devnull(self._reports, self.fd, *self._processes.values())

    def handed_over(self) -> None:
        """Close this process's copy of the other end of the pipe for reports, once the fork server has its own."""
        report, self.report = self.report, -1
        if report >= 0:
            os.close(report)

    def exits(self) -> list[Exit]:
        """Return the ranks that have ended since the last call."""
        exits, self._not_ours = self._not_ours, []
        if self.alive:
            exits += self._reported()
            exits += self._unreported()
        return exits

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process, if it still lives."""
        pid = self.pids[rank]
        if pid is None or rank not in self.alive:
            return
        with contextlib.suppress(ProcessLookupError):
            if rank not in self._processes or not _signal_by_pidfd(self._processes[rank], signum):
                os.kill(pid, signum)

    def close(self) -> None:
        self.handed_over()
        for rank in list(self._processes):
            self._forget(rank)
        if self._poll is not None:
            self._poll.close()
        os.close(self._reports)
        self._reports = self.fd = -1

    def _reported(self) -> list[Exit]:
        """Return the ends of ranks that the fork server has reported."""
        exits: list[Exit] = []
        while self.alive:
            try:
                data = os.read(self._reports, REPORT.size)
            except BlockingIOError:
                break
            if not data:  # it is gone, and cannot end what its ranks have started
                exits += [self._lost(rank) for rank in sorted(self.alive)]
                break
            rank, pid, status = REPORT.unpack(data)
            if rank not in self.alive:
                continue
            if status == STARTED:
                self.pids[rank] = pid
                self.on_start()
            elif pid:
                self.pids[rank] = pid
                exits.append(self._ended(rank, status))
            else:
                exits.append(self._ended(rank, None, not_started(status)))
        for rank in self.alive - self._processes.keys():
            pid = self.pids[rank]
            if self._poll is not None and pid is not None and (fd := open_pidfd(pid)) >= 0:
                self._processes[rank] = fd
                self._poll.register(fd, select.EPOLLIN)
        return exits

    def _unreported(self) -> list[Exit]:
        """Return the ends of ranks that have ended without a report of the fork server."""
        exits: list[Exit] = []
        deadline = time.monotonic() + _DELAY
        while gone := self._gone():
            if not readable(self._reports, max(0.0, deadline - time.monotonic())):
                return exits + [self._ended(rank, exit_status(self.pids[rank] or 0)) for rank in gone]
            exits += self._reported()
        return exits

    def _gone(self) -> list[int]:
        """Return the ranks whose processes have ended, those too that ended before they could be watched."""
        ended = {fd for fd, _ in self._poll.poll(0)} if self._poll is not None else set()
        gone = [rank for rank, fd in self._processes.items() if fd in ended]
        unwatched = ((rank, self.pids[rank]) for rank in self.alive - self._processes.keys())
        return sorted(gone + [rank for rank, pid in unwatched if pid is not None and not exists(pid)])

    def _lost(self, rank: int) -> Exit:
        pid = self.pids[rank]
        if pid is None:
            return self._ended(rank, None, self.why_lost())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return self._ended(rank, None)

    def _ended(self, rank: int, status: int | None, reason: str = "") -> Exit:
        self.alive.discard(rank)
        self._forget(rank)
        return Exit(rank, status, reason)

    def _forget(self, rank: int) -> None:
        fd = self._processes.pop(rank, -1)
        if fd >= 0:
            if self._poll is not None:
                with contextlib.suppress(OSError):  # in a child of this process there is nothing to take it out of
                    self._poll.unregister(fd)
            os.close(fd)


def _signal_by_pidfd(fd: int, signum: int) -> bool:
    """Send a signal to the process of a descriptor; return False if a sandbox or this version of Python does not allow
    that."""
    try:
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return False
    return True

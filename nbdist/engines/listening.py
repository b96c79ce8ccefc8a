"""Output, messages and ends of ranks, read by one thread, for each rank in order."""

from __future__ import annotations

import functools
import math
import os
import select
import selectors
import time
from collections.abc import Callable
from typing import Any

from ..deaths import NEVER_STARTED, SILENT
from ..system.interrupts import deferred_interrupts
from ..wire.channel import readable
from ..wire.parcel import Parcel
from ..wire.protocol import FromRank
from .contract import Exit, OnOutput
from .descriptors import Described

#: Seconds that a process whose channel is closed may take until it has ended: freeing GPUs takes a while.
_PATIENCE = 3.0
#: Bytes that are read at once where ranks write much: pauses become so short. A pipe has room for more.
_AT_ONCE = 32 << 10


def pass_on(ranks: Described, rank: int, which: int, on_output: OnOutput) -> bool | None:
    """Pass on output of a rank, but only so much that other ranks need not wait.

    Returns True if more may follow, None if there is nothing more for now, False at the end.
    """
    for _ in range(16):
        try:
            data = os.read(ranks.outputs[rank][which], 1 << 16)
        except BlockingIOError:
            return None
        on_output(rank, which, data)
        if not data:
            return False
    return True


def drain(ranks: Described, rank: int, which: int, on_output: OnOutput) -> None:
    """Pass on all output of a rank so far."""
    while pass_on(ranks, rank, which, on_output):
        pass


class Listener:
    """A listener that waits for events of ranks of this machine, and passes them on.

    The output of a rank is passed on before a message that the rank sent later, and both before its end.

    Args:
        ranks: The ranks to listen to.
        on_output: Called with the output of a rank.
        on_message: Takes a rank's message and its parcel.
        on_exit: Takes the end of a rank.
        on_start: Takes the rank and the pid of a process that has started.
        pause: The number of seconds for which a descriptor of output is not read after it was read; less if there is
            much output. Infinite: until `resume`.
    """

    def __init__(
        self,
        ranks: Described,
        *,
        on_output: OnOutput,
        on_message: Callable[[int, FromRank, Parcel | None], None],
        on_exit: Callable[[Exit], None],
        on_start: Callable[[int, int], None] = lambda rank, pid: None,
        pause: float = math.inf,
    ) -> None:
        self._ranks = ranks
        self._on_output, self._on_message, self._on_exit, self._on_start = on_output, on_message, on_exit, on_start
        self._pause, self._resume_at = pause, 0.0
        self._next_pause = pause  # shorter while ranks write so much that a pipe would be full at its end
        self._read = 0  # bytes since the last pause
        self._started: set[int] = set()
        self._living = set(range(len(ranks.pids)))
        self._silent: set[int] = set()  # their channel is at its end
        self._explained_by: dict[int, float] = {}  # when their exit must have explained that
        self._paused = [(rank, which) for rank in self._living for which in (0, 1)]  # outputs that were just read
        self._selector = selectors.DefaultSelector()
        self.watch(ranks.exits_fd, self._exits)
        self._written = [select.poll() for _ in ranks.channels]  # asked once for each message: there may be very many
        for rank, channel in enumerate(ranks.channels):
            for fd in ranks.outputs[rank]:
                self._written[rank].register(fd, select.POLLIN)
            self.watch(channel, functools.partial(self._message, rank))
        self.resume()

    def watch(self, fd: Any, action: Callable[[], None]) -> None:
        """Call `action` whenever a descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `select` has something to pass on."""
        return int(self._selector.fileno())

    def due(self) -> float | None:
        """Return the number of seconds after which `select` must be called even without an event. None: no limit."""
        moments = [*self._explained_by.values()]
        if self._paused and self._pause < math.inf:
            moments.append(self._resume_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def select(self, seconds: float) -> None:
        """Pass on all events that have arrived; without any, wait at most `seconds` for the first one."""
        due = self.due()
        for key, _ in self._selector.select(seconds if due is None else min(seconds, due)):
            with deferred_interrupts():  # what was read of a message would be lost
                key.data()
        for rank in [rank for rank, until in self._explained_by.items() if time.monotonic() >= until]:
            self._on_end(Exit(rank, None, SILENT if self._ranks.pids[rank] is not None else NEVER_STARTED))
        if self._paused and time.monotonic() >= self._resume_at:
            self.resume()

    def resume(self) -> None:
        """Listen to all outputs again."""
        share = _AT_ONCE / self._read if self._read else math.inf
        self._next_pause, self._read = min(self._pause, self._next_pause * share), 0
        for rank, which in self._paused:
            fd = self._ranks.outputs[rank][which]
            if fd not in self._selector.get_map():  # an interrupt came before it was taken out
                self.watch(fd, functools.partial(self._output, rank, which))
        self._paused.clear()

    def drain(self, rank: int) -> None:
        """Pass on all output of a rank so far."""
        for fd, _ in self._written[rank].poll(0):
            drain(self._ranks, rank, self._ranks.outputs[rank].index(fd), self._on_output)

    def close(self) -> None:
        self._selector.close()

    def _output(self, rank: int, which: int) -> None:
        if not self._paused:
            self._resume_at = time.monotonic() + self._next_pause
        self._paused.append((rank, which))  # first of all: an interrupt may come between any two of these lines
        self._selector.unregister(self._ranks.outputs[rank][which])
        if pass_on(self._ranks, rank, which, self._take) is False:
            self._paused.remove((rank, which))

    def _take(self, rank: int, which: int, data: bytes) -> None:
        self._read += len(data)
        self._on_output(rank, which, data)

    def _message(self, rank: int) -> None:
        channel = self._ranks.channels[rank]
        if rank in self._silent or not readable(channel):  # it was read since this was found readable
            return
        try:
            message, parcel, _ = channel.receive()
        except (EOFError, ConnectionError):
            self._selector.unregister(channel)
            self._silent.add(rank)
            if rank in self._living:
                self._explained_by[rank] = time.monotonic() + _PATIENCE
            return
        self.drain(rank)
        self._on_message(rank, message, parcel)

    def _exits(self) -> None:
        exits = self._ranks.exits()
        for rank, pid in enumerate(self._ranks.pids):
            if pid is not None and rank not in self._started:
                self._started.add(rank)
                self._on_start(rank, pid)
        for exit in exits:
            while exit.rank not in self._silent and readable(self._ranks.channels[exit.rank]):
                self._message(exit.rank)
            self._on_end(exit)
        if exits and not self._living:  # where the fork server is gone, this stays readable
            self._selector.unregister(self._ranks.exits_fd)

    def _on_end(self, exit: Exit) -> None:
        if exit.rank in self._living:
            self._living.discard(exit.rank)
            self._explained_by.pop(exit.rank, None)
            self.drain(exit.rank)
            self._on_exit(exit)

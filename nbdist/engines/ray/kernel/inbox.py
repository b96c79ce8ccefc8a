"""Events of the ranks on a cluster, in the kernel: a thread reads them from the driver, calls take them from here.

The events of a node arrive in order: the output of a rank before a later message of the rank, and before its end.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import selectors
import threading
from collections.abc import Callable
from typing import Any

from ....deaths import NOT_OURS
from ....system.interrupts import deferred_interrupts
from ....system.processes import redirect_to_devnull
from ....wire.parcel import Parcel
from ....wire.protocol import FromRank
from ...contract import Exit, OnOutput
from .driver_process import DriverProcess

#: Bytes of output after which the driver gets an acknowledgment.
_ACKNOWLEDGE = 1 << 18


class Inbox:
    """The queue of events of a session's ranks: messages, output and exits that the kernel has not taken yet.

    Attributes:
        pids: The process of each rank, by rank; None before it has started.
        alive: The ranks that are not known to have ended.
        lost: The ranks whose node is lost.
    """

    def __init__(self, driver: DriverProcess) -> None:
        self._driver = driver
        self.pids: list[int | None] = [None] * driver.world_size
        self.alive = set(range(driver.world_size))
        self.lost: set[int] = set()
        self._events: collections.deque[tuple[Any, ...]] = collections.deque()
        self._written: dict[tuple[int, int], collections.deque[bytes]] = {}
        self._read = 0  # bytes that the driver does not know of yet
        self._lock = threading.RLock()
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)
        driver.subscribe(self._take)

    def after_fork(self) -> None:
        """Forget the ranks in a child of this process: they belong to the parent."""
        self._lock = threading.RLock()
        self._events.clear()
        self._lose(self.alive, NOT_OURS)
        redirect_to_devnull(self.fd, self._wake)

    def close(self) -> None:
        self._driver.subscribe(None)
        with self._lock:
            for event in self._events:
                if event[0] == "message" and event[-1] is not None:
                    event[-1].close()
            self._events.clear()
            for fd in (self.fd, self._wake):
                os.close(fd)
            self.fd = self._wake = -1

    def _take(self, kind: str, what: Any, parcel: Parcel | None) -> None:
        """Store an event. Runs in the thread that reads from the driver."""
        with self._lock:
            if self._wake < 0:  # closed meanwhile
                if parcel is not None:
                    parcel.close()
                return
            if kind == "events":
                for event in pickle.loads(what):
                    getattr(self, f"_on_{event[0]}")(*event[1:])
            elif kind == "answered":
                rank, message = what
                self._events.append(("message", rank, message, parcel))
            else:
                ranks, why = what
                self._lose(self.alive if ranks is None else self.alive & set(range(*ranks)), why)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"!")

    def _lose(self, ranks: set[int], why: str) -> None:
        self.lost |= ranks
        for rank in sorted(ranks):
            self._on_exit(rank, None, why)

    def _on_started(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid

    def _on_output(self, rank: int, which: int, data: bytes) -> None:
        self._written.setdefault((rank, which), collections.deque()).append(data)
        self._events.append(("output", rank, which))

    def _on_message(self, ranks: list[int], message: FromRank, inline: bytes | None) -> None:
        for rank in ranks:
            self._events.append(("message", rank, message, None if inline is None else Parcel(inline, [], [])))

    def _on_exit(self, rank: int, status: int | None, reason: str) -> None:
        if rank in self.alive:
            self.alive.discard(rank)
            self._events.append(("exit", Exit(rank, status, reason)))

    # ------------------------------------------------------------------------------------------------ in the kernel

    def __len__(self) -> int:
        return len(self._events)

    def next(self) -> tuple[Any, ...] | None:
        """Return the oldest event that was not taken yet."""
        with self._lock:
            return self._events.popleft() if self._events else None

    def any_exit(self) -> bool:
        with self._lock:
            return any(event[0] == "exit" for event in self._events)

    def exits(self) -> list[Exit]:
        """Return the ranks that have ended since the last call."""
        with self._lock:
            found = [event[1] for event in self._events if event[0] == "exit"]
            if found:
                self._events = collections.deque(event for event in self._events if event[0] != "exit")
            return found

    def pass_on(self, rank: int, which: int, on_output: OnOutput) -> bool:
        """Pass on one piece of a rank's output; return False if there is none."""
        pieces = self._written.get((rank, which))
        if not pieces:
            return False
        with deferred_interrupts():  # what was taken would be lost
            data = pieces.popleft()
            self._read += len(data)
            on_output(rank, which, data)
        if self._read >= _ACKNOWLEDGE:
            read, self._read = self._read, 0
            with contextlib.suppress(OSError):
                self._driver.send("read", 0, read)
        return True

    def drain(self, rank: int, on_output: OnOutput) -> None:
        """Pass on all output of a rank so far."""
        for which in (0, 1):
            while self.pass_on(rank, which, on_output):
                pass


class InboxListener:
    """A listener for the events of an inbox: see `contract.Listening`."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        on_output: OnOutput,
        on_message: Callable[[int, FromRank, Parcel | None], None],
        on_exit: Callable[[Exit], None],
        pause: float,
    ) -> None:
        """Listen to `inbox`. `pause` has no effect: nodes gather output before they send it."""
        self._inbox, self._on_output, self._on_message, self._on_exit = inbox, on_output, on_message, on_exit
        self._selector = selectors.DefaultSelector()
        self.watch(inbox.fd, lambda: os.read(inbox.fd, 1 << 12))

    def watch(self, fd: Any, action: Callable[[], Any]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def select(self, seconds: float) -> None:
        # After an interrupt there may be events that the descriptor does not announce any more.
        for key, _ in self._selector.select(0.0 if len(self._inbox) else seconds):
            key.data()
        for _ in range(len(self._inbox)):
            if (event := self._inbox.next()) is not None:
                self._pass_on(*event)

    def close(self) -> None:
        self._selector.close()

    def _pass_on(self, kind: str, *what: Any) -> None:
        if kind == "output":
            rank, which = what
            self._inbox.pass_on(rank, which, self._on_output)
        elif kind == "message":  # all earlier output has been passed on, in the order of arrival
            self._on_message(*what)
        else:
            self._inbox.drain(what[0].rank, self._on_output)
            self._on_exit(what[0])

"""Calls of one session take turns; those in the background are futures."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .transport import Parcel

T = TypeVar("T")


class Turns:
    """First come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: collections.deque[object] = collections.deque()

    def draw(self) -> object:
        """A ticket: a place at the end of the queue."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
        return ticket

    def busy(self) -> bool:
        """Whether somebody has a turn, or waits for one."""
        return bool(self._queue)

    @contextmanager
    def taken(self, ticket: object) -> Iterator[None]:
        """Wait for the ticket's turn, and have it meanwhile. An interrupt while waiting gives the ticket up."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is ticket)
            yield
        finally:
            with self._changed:
                self._queue.remove(ticket)
                self._changed.notify_all()


class Stop:
    """Asks a running call to stop, from any thread: as the notebook's stop button asks the call of a cell."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        self._lock = threading.Lock()

    def ask(self) -> None:
        with self._lock:
            if self._write >= 0:
                os.write(self._write, b"!")

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            os.close(self._write)
            self._write = -1


class CallFuture(concurrent.futures.Future[T]):
    """The result of a call in the background."""

    def __init__(self, ask_to_stop: Callable[[], None]) -> None:
        super().__init__()
        self._ask_to_stop = ask_to_stop

    def cancel(self) -> bool:
        """Stop the call: one that waits for its turn never starts, one that runs is interrupted as a cell is.

        The ranks get five seconds for their `finally` blocks; a second `cancel` does not wait for them. Then `result`
        raises `CancelledError`. Returns False where the call is over already.
        """
        if super().cancel():
            return True
        self._ask_to_stop()
        return not self.done()

    def cancelled(self) -> bool:
        """Whether the call was stopped by `cancel`, before it started or while it ran."""
        if super().cancelled():
            return True
        return self.done() and isinstance(self.exception(), concurrent.futures.CancelledError)


def in_background(call: Callable[[Stop], T], parcel: Parcel, turns: Turns, name: str) -> CallFuture[T]:
    """Run `call`, which sends `parcel`, in a thread when its turn comes."""
    stop, ticket = Stop(), turns.draw()
    future: CallFuture[T] = CallFuture(stop.ask)

    def work() -> None:
        nonlocal call
        settle: Callable[[], None]
        with contextlib.closing(stop), contextlib.closing(parcel), turns.taken(ticket):
            if not future.set_running_or_notify_cancel():
                return
            try:
                settle = functools.partial(future.set_result, call(stop))
            except KeyboardInterrupt:
                stopped = concurrent.futures.CancelledError("the call was stopped by cancel()")
                settle = functools.partial(future.set_exception, stopped)
            except BaseException as exc:
                settle = functools.partial(future.set_exception, exc)
            del call  # with what it holds
        settle()  # not in its turn any more: what is called then may want one

    # Not an executor: those are waited for when the interpreter ends, and a training may take hours.
    threading.Thread(target=work, name=f"nbdist: {name}", daemon=True).start()
    return future

"""Calls of one session take turns; those in the background are futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ...errors import NbdistError, entry
from ...system.interrupts import heard_interrupts
from ...system.limits import allow_more_above
from ...system.processes import forget_in_children
from ...wire.parcel import Parcel

T = TypeVar("T")


#: Where a call stands in the queue; what is put there wakes it up.
Ticket = queue.SimpleQueue[None]

#: Seconds from one look at the queue to the next, for a caller that was not woken up.
_LOOK = 0.2


class FairLock:
    """A lock that gives turns in the order of the requests.

    An interrupt of the notebook may come between any two steps, and on the way into any function written in Python: a
    turn that is given back there could be lost. So it is given back by a single call into C (`dict.pop`), and those
    who wait do not rely on being woken up.
    """

    def __init__(self) -> None:
        self._queue: dict[Ticket, int] = {}  # with the thread that has a turn, or waits for it; 0 as long as none does
        forget_in_children(self)

    def after_fork(self) -> None:
        """In a child of this process: the threads that wait here are not there."""
        self._queue.clear()

    def busy(self) -> bool:
        """Return whether a call runs, or waits for its turn."""
        return bool(self._queue)

    def draw(self) -> Ticket:
        """A place at the end of the queue, for a later `in_turn`."""
        ticket = Ticket()
        self._queue[ticket] = 0
        return ticket

    def in_turn(self, action: Callable[[], T], ticket: Ticket | None = None) -> T:
        """Call `action` after all earlier ones are done, and return its value.

        An interrupt while it waits gives its place up. Raises `NbdistError` in a thread that would wait for itself.
        """
        ticket, thread = ticket or Ticket(), threading.get_ident()
        if thread in list(self._queue.values()):
            raise NbdistError(
                "the session is used while a call of the same thread captures, sends or awaits something: by an object "
                "that is pickled or rebuilt (`__getstate__`, `__reduce__`, `__setstate__`), or by a signal handler. "
                "Make that call before, and hand its value over"
            )
        try:
            self._queue[ticket] = thread  # those that have drawn it keep their place
            with heard_interrupts():
                while self._first() is not ticket:
                    with contextlib.suppress(queue.Empty):
                        ticket.get(timeout=_LOOK)
                return action()
        finally:
            self._queue.pop(ticket, None)
            self._wake()

    def give_back(self, ticket: Ticket) -> None:
        """Leave the queue, without having had a turn."""
        self._queue.pop(ticket, None)
        self._wake()

    def _first(self) -> Ticket | None:
        return next(iter(list(self._queue)), None)  # of a copy: other threads change the queue meanwhile

    def _wake(self) -> None:
        first = self._first()
        if first is not None:
            first.put(None)


class Stop:
    """Asks a running call to stop, from any thread: as the notebook's stop button asks the call of a cell."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        allow_more_above(self._write)  # many calls may wait for their turn, each with its data
        self._lock = threading.RLock()  # a signal handler may cancel a call, too

    def ask(self) -> None:
        with self._lock:
            if self._write >= 0:
                os.write(self._write, b"!")

    def close(self) -> None:
        with self._lock:
            write, self._write = self._write, -1
            if write >= 0:
                os.close(self.fd)
                os.close(write)


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

    @entry
    def result(self, timeout: float | None = None) -> T:
        """Wait, at most `timeout` seconds, and return the value of the call. Raises what `Session.run` would."""
        with heard_interrupts():
            return super().result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        """Return what `result` returns, for `await`. Cancelling the task that awaits it cancels the call.

        A `StopIteration` of the call is the cause of a `RuntimeError`, as in any coroutine.
        """
        over: concurrent.futures.Future[None] = concurrent.futures.Future()  # asyncio's take no StopIteration

        def end(_: object) -> None:
            if over.set_running_or_notify_cancel():
                over.set_result(None)

        self.add_done_callback(end)
        over.add_done_callback(lambda _: over.cancelled() and self.cancel())
        yield from asyncio.wrap_future(over).__await__()
        try:
            return self.result()
        except concurrent.futures.CancelledError as exc:
            raise asyncio.CancelledError(*exc.args) from None

    def cancelled(self) -> bool:
        """Return whether the call was stopped by `cancel`, before it started or while it ran."""
        if super().cancelled():
            return True
        return self.done() and isinstance(self.exception(), concurrent.futures.CancelledError)


def in_background(call: Callable[[Stop], T], parcel: Parcel, lock: FairLock, name: str) -> CallFuture[T]:
    """Run `call`, which sends `parcel`, in a thread when its turn comes."""
    stop = Stop()
    future: CallFuture[T] = CallFuture(stop.ask)
    settle: list[Callable[[], None]] = []

    def carry_out() -> None:
        nonlocal call
        if not future.set_running_or_notify_cancel():
            return
        try:
            settle.append(functools.partial(future.set_result, entry(call)(stop)))
        except KeyboardInterrupt as exc:
            stopped = concurrent.futures.CancelledError("\n".join(["the call was stopped by cancel()", *exc.args]))
            settle.append(functools.partial(future.set_exception, stopped))
        except BaseException as exc:
            settle.append(functools.partial(future.set_exception, exc))
        del call  # with what it holds

    def work() -> None:
        with contextlib.closing(stop), contextlib.closing(parcel):
            lock.in_turn(carry_out, ticket)
        if settle:
            settle.pop()()  # not in its turn any more: what is called then may want one

    ticket = lock.draw()
    try:
        # Not an executor: those are waited for when the interpreter ends, and a training may take hours.
        threading.Thread(target=work, name=f"nbdist: {name}", daemon=True).start()
    except BaseException:  # no thread can be started, or an interrupt came
        if concurrent.futures.Future.cancel(future):  # it has not begun, and never will
            lock.give_back(ticket)
            stop.close()
            parcel.close()
        else:
            stop.ask()
        raise
    return future

"""The queue in which the calls of one session take turns, and futures for calls in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ...errors import NbdistError, entry
from ...system.interrupts import interruptible
from ...system.limits import allow_more_above
from ...system.processes import register_after_fork
from ...wire.parcel import Parcel

T = TypeVar("T")


#: The place of a call in the queue. An item that is put into it wakes the call up.
Ticket = queue.SimpleQueue[None]

#: Seconds between two looks at the queue, for a caller that was not woken up.
_LOOK = 0.2


class FairLock:
    """A lock that gives turns in the order of the requests.

    The notebook's interrupt may come between any two bytecodes and at the start of any Python function, so Python code
    that gives a turn back might not run to its end. Therefore one call into C (`dict.pop`) gives it back, and callers
    that wait look at the queue from time to time, too.
    """

    def __init__(self) -> None:
        self._queue: dict[Ticket, int] = {}  # ticket -> its thread; 0 before `in_turn`
        register_after_fork(self)

    def after_fork(self) -> None:
        """Empty the queue in a child of this process, which has none of the threads that wait here."""
        self._queue.clear()

    def busy(self) -> bool:
        """Return whether a call runs or waits for its turn."""
        return bool(self._queue)

    def draw(self) -> Ticket:
        """Take a place at the end of the queue, for a later `in_turn`."""
        ticket = Ticket()
        self._queue[ticket] = 0
        return ticket

    def is_first(self, ticket: Ticket) -> bool:
        """Return whether the turn of this ticket has come."""
        return self._first() is ticket

    def in_turn(self, action: Callable[[], T], ticket: Ticket | None = None) -> T:
        """Call `action` when all earlier actions are done, and return its value.

        An interrupt during the wait leaves the queue. Raises `NbdistError` in a thread that has a turn already: the
        thread would wait for itself.
        """
        ticket, thread = ticket or Ticket(), threading.get_ident()
        if thread in list(self._queue.values()):
            raise NbdistError(
                "a call of this session is running in the same thread, so a second call would wait forever. The second "
                "call comes from an object that is pickled or rebuilt (`__getstate__`, `__reduce__`, `__setstate__`), "
                "or from a signal handler. Make the second call before the first one, and pass its value"
            )
        try:
            self._queue[ticket] = thread  # a ticket that was drawn before keeps its place
            with interruptible():
                while not self.is_first(ticket):
                    with contextlib.suppress(queue.Empty):
                        ticket.get(timeout=_LOOK)
                return action()
        finally:
            self._queue.pop(ticket, None)
            self._wake()

    def give_back(self, ticket: Ticket) -> None:
        """Leave the queue without waiting for the turn."""
        self._queue.pop(ticket, None)
        self._wake()

    def _first(self) -> Ticket | None:
        return next(iter(list(self._queue)), None)  # a copy, because other threads change the queue meanwhile

    def _wake(self) -> None:
        first = self._first()
        if first is not None:
            first.put(None)


class Stop:
    """A request to stop a running call, from any thread, as the stop button stops the call of a cell."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        allow_more_above(self._write)  # many calls may wait for their turn, each with open files
        self._lock = threading.RLock()  # reentrant: a signal handler may cancel a call, too

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
        """Stop the call. A call that waits for its turn never starts; a running call is interrupted like a cell.

        The ranks get five seconds for their `finally` blocks. A second `cancel` ends them at once. Then `result`
        raises `CancelledError`. Returns False if the call is over already.
        """
        if super().cancel():
            return True
        self._ask_to_stop()
        return not self.done()

    @entry
    def result(self, timeout: float | None = None) -> T:
        """Return the value of the call. Wait at most `timeout` seconds for it.

        Raises the exceptions of `Session.run`, `TimeoutError` after `timeout` seconds, and `CancelledError` after
        `cancel`.
        """
        with interruptible():
            return super().result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait with `await`, and return the value of the call. Canceling the task that awaits it cancels the call.

        A `StopIteration` that the call raises becomes a `RuntimeError` with this cause, as in any coroutine.
        """
        import asyncio  # most programs do without, and it takes 50 ms

        over: concurrent.futures.Future[None] = concurrent.futures.Future()  # asyncio's futures refuse StopIteration

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
    """Run `call` in a thread when its turn in `lock` comes, and return a future for its value.

    Args:
        call: Sends `parcel` and waits for the answers.
        parcel: Closed when the call is over.
        lock: The queue of the session.
        name: The name of the function, for the name of the thread.
    """
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
        del call  # free the captured objects

    def work() -> None:
        with contextlib.closing(stop), contextlib.closing(parcel):
            lock.in_turn(carry_out, ticket)
        if settle:
            settle.pop()()  # after its turn: a callback of the future may make another call

    ticket = lock.draw()
    try:
        # Not a ThreadPoolExecutor: the interpreter waits for its threads at exit, and a training may take hours.
        threading.Thread(target=work, name=f"nbdist: {name}", daemon=True).start()
    except BaseException:  # no thread can be started, or an interrupt came
        if concurrent.futures.Future.cancel(future):  # the call has not begun, and never will
            lock.give_back(ticket)
            stop.close()
            parcel.close()
        else:
            stop.ask()
        raise
    return future

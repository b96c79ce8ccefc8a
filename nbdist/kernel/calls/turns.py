"""The turns of a session: its calls, widgets and debuggers one at a time, in the cell or in the background."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ...errors import NbdistError, RemoteTraceback, summary
from ...notebook.shell import debug_instead
from ..cell.cell import Cell
from .executor import Executor, Request
from .futures import CallFuture, FairLock, Stop, in_background

T = TypeVar("T")


class Turns:
    """The turns in which threads use the ranks of a session, one at a time.

    Args:
        executor: The ranks.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = FairLock()
        self._background: weakref.WeakSet[CallFuture[Any]] = weakref.WeakSet()
        self._raised: RemoteTraceback | None = None  # of the last call that has raised
        executor.between = weakref.WeakMethod(self._deliver_widget_event)  # the page must not keep it alive

    def busy(self) -> bool:
        """Return whether a call runs, or waits for its turn."""
        return self._lock.busy()

    def take(self, action: Callable[[], T]) -> T:
        """Call `action` when all earlier calls are over, and return its value."""
        return self._lock.in_turn(action)

    def run(self, request: Request) -> list[Any]:
        """Run a request and return the values of the ranks that answer."""
        with contextlib.closing(request.call.parcel):
            return self._lock.in_turn(lambda: self._carry_out(request, Cell()))

    def submit(self, request: Request) -> CallFuture[Any]:
        """Run a request in the background; its output goes to the cell that runs now."""
        call = functools.partial(self._carry_out_first, request, Cell(background=True))
        future: CallFuture[Any] = in_background(call, request.call.parcel, self._lock, request.what)
        self._background.add(future)
        return future

    def follow(self, start: Callable[[FairLock], CallFuture[Any] | None]) -> None:
        """Call `start` with the lock of the turns, and remember the background call that it begins. `start` returns
        None if it begins none.
        """
        future = start(self._lock)
        if future is not None:
            self._background.add(future)

    def cancel_background(self) -> None:
        """Stop the calls in the background that are not over."""
        for future in list(self._background):
            future.cancel()

    def post_mortem(self, rank: int | None, commands: Iterable[str] | None) -> None:
        """Open pdb in a rank that raised an exception. The arguments are the arguments of `Session.post_mortem`."""
        self._lock.in_turn(lambda: self._debug(rank, commands))

    def _debug(self, rank: int | None, commands: Iterable[str] | None) -> None:
        held = self._executor.raised()
        if not held:
            raise NbdistError(
                "no rank is held: post_mortem() needs a session with hold_on_error=True, and must follow directly "
                "after a call that raised in a rank"
            )
        rank = held[0] if rank is None else rank
        if rank not in held:
            raise ValueError(f"rank must be one of the held ranks, {', '.join(map(str, held))}, got {rank}")
        self._executor.debug(rank, commands, Cell())

    def _debug_raised(self, remote: RemoteTraceback) -> bool:
        """Open the debugger for `%debug` after a call has raised; return whether a rank had frames to show."""
        if remote is not self._raised or not self._executor.raised():
            return False
        self.post_mortem(None, None)
        return True

    def _deliver_widget_event(self, rank: int, event: dict[str, Any], buffers: Sequence[bytes], cell: Cell) -> bool:
        """Pass a change of a widget in the page to its rank; return False while a call runs."""
        if self._lock.busy():
            return False
        self._lock.in_turn(lambda: self._executor.deliver_widget_event(rank, event, buffers, cell))
        return True

    def _carry_out(self, request: Request, cell: Cell, stop: Stop | None = None) -> list[Any]:
        try:
            return self._executor.carry_out(request, cell, stop)
        except Exception as exc:
            if isinstance(exc.__cause__, RemoteTraceback) and self._executor.raised():
                self._raised = exc.__cause__
                debug_instead(self._raised, weakref.WeakMethod(self._debug_raised))
            raise

    def _carry_out_first(self, request: Request, cell: Cell, stop: Stop) -> Any:
        try:
            return self._carry_out(request, cell, stop)[0]
        except KeyboardInterrupt:  # it was cancelled
            raise
        except BaseException as exc:
            cell.notice(
                f"{request.what} failed in the background: {summary(exc)}. result() raises it, with its traceback"
            )
            raise

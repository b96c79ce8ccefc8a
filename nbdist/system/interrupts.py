"""Interrupts at difficult moments: in the middle of a step such as a message, within an event loop, or where Python
would drop them.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Generic, ParamSpec, TypeVar

#: `signal` without its enums: making these takes most of the time of a block, and a call has twenty blocks.
_raw: Any = importlib.import_module("_signal")
_SIGINT = int(signal.SIGINT)

#: Seconds until an interrupt comes again that Python has dropped: by then it has left what has dropped it.
_AGAIN = 0.05
#: A signal without effect of its own, after which Python handles an earlier signal. CPython runs signal handlers
#: between bytecodes only: a signal just before a system call that waits, such as that in `time.sleep`, is not handled
#: before the end of the system call.
NUDGE = signal.SIGURG
#: The numbers of all other signals.
_OTHERS = tuple(signum for signum in range(1, signal.NSIG) if signum not in (_SIGINT, NUDGE))
#: Seconds from an interrupt to each nudge. On a busy machine a thread may stay just before a system call for a while.
NUDGES = (0.05, 0.25, 1.0)

_handler: Any = None  # the function that is to be called for them
_count = 0

#: Functions whose end an interrupt waits for in a rank: what they do, by their code.
undivided_steps: dict[CodeType, str] = {}

_P = ParamSpec("_P")
_T = TypeVar("_T")


def undivided(what: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function whose end an interrupt waits for in a rank, because half of it would break later calls.

    Args:
        what: A description of the step for the notice to the user, such as "imports a module".
    """

    def decorate(fn: Any) -> Any:
        undivided_steps[fn.__code__] = what
        return fn

    return decorate


class _UndividedContext(Generic[_T]):
    def __init__(self, inner: contextlib.AbstractContextManager[_T]) -> None:
        self._inner = inner

    @undivided("replaces functions of a library")
    def __enter__(self) -> _T:
        return self._inner.__enter__()

    @undivided("puts functions of a library back")
    def __exit__(self, *raised: Any) -> bool | None:
        return self._inner.__exit__(*raised)


def undivided_context(make: Callable[_P, Iterator[_T]]) -> Callable[_P, _UndividedContext[_T]]:
    """Make a context as `contextlib.contextmanager` does, whose beginning and end are `undivided`."""
    manager = contextlib.contextmanager(make)

    @functools.wraps(make)
    def context(*args: _P.args, **kwargs: _P.kwargs) -> _UndividedContext[_T]:
        return _UndividedContext(manager(*args, **kwargs))

    return context


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer a SIGINT in the main thread to the end of this block. A second SIGINT interrupts at once.

    Blocking the signal in the main thread does not help: another thread of the process receives it, and Python calls
        the handler in the main thread anyway.
    """
    global _handler, _count
    if threading.current_thread() is not threading.main_thread():  # which never handles any
        yield
        return
    handler = _raw.getsignal(_SIGINT)
    if handler is None or handler is defer:  # not Python's; or a block within another
        yield
        return
    _handler, _count = handler, 0
    _raw.signal(_SIGINT, defer)
    try:
        yield
    finally:
        _raw.signal(_SIGINT, handler)
        if _count == 1 and callable(handler):
            handler(signal.SIGINT, sys._getframe())
        elif _count == 1:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def deferred_handlers() -> Iterator[None]:
    """Defer all signal handlers in the main thread, also for SIGINT, to the end of this block.

    A handler may raise, as the handler of a timeout does. A second signal of the same number is handled at once.
    """
    arrived: list[int] = []

    def keep(signum: int, frame: Any) -> None:
        if signum in arrived:
            handlers[signum](signum, frame)
        else:
            arrived.append(signum)

    handlers = _other_handlers()
    with deferred_interrupts():
        try:
            with contextlib.ExitStack() as stack:
                for signum, handler in handlers.items():
                    stack.callback(_raw.signal, signum, handler)
                    _raw.signal(signum, keep)
                yield
        finally:
            for signum in arrived:
                handlers[signum](signum, sys._getframe())


@contextlib.contextmanager
def dropped_exceptions() -> Iterator[None]:
    """Call signal handlers in this block, and drop the exceptions that they raise. The handler of SIGINT still raises.

    The handler of a timer may raise again and again, while ranks clean up after its first exception.
    """
    handlers = _other_handlers()

    def call(signum: int, frame: Any) -> None:
        with contextlib.suppress(BaseException):
            handlers[signum](signum, frame)

    for signum in handlers:
        _raw.signal(signum, call)
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            if _raw.getsignal(signum) is call:  # the handler itself has set no other one
                _raw.signal(signum, handler)


def _other_handlers() -> dict[int, Any]:
    """Return the functions that handle signals other than SIGINT in the main thread, by number; none in a thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = zip(_OTHERS, map(_raw.getsignal, _OTHERS), strict=True)  # each call needs it: 4 µs
    return {signum: handler for signum, handler in found if callable(handler)}


def defer(signum: int, frame: Any) -> None:
    """Count a SIGINT in a block of `deferred_interrupts`, and handle the second one: the signal handler there."""
    global _count
    _count += 1
    if _count > 1 and callable(_handler):
        _handler(signum, frame)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make a SIGINT in this block raise `KeyboardInterrupt` in the main thread, within an event loop, too.

    In a cell with a top-level `await`, and under `asyncio.run`, the handler of SIGINT only cancels a task. The task
    ends at its next `await`, but a call of nbdist in the task awaits nothing.
    """
    here = threading.current_thread() is threading.main_thread()
    handler: Any = _raw.getsignal(_SIGINT) if here else None
    if not _only_cancels(handler):
        yield
        return

    def cancel_and_raise(signum: int, frame: Any) -> None:
        handler(signum, frame)
        raise KeyboardInterrupt

    _raw.signal(_SIGINT, cancel_and_raise)
    try:
        yield
    finally:
        _raw.signal(_SIGINT, handler)


class kept_interrupts:
    """Repeat an interrupt in this block that Python drops. This works in the main thread.

    Python drops exceptions in finalizers and callbacks. The lock of an import has such a callback, so a call that
    imports something may lose a press of the stop button. Ranks handle this in `rank/interrupts.py`.
    """

    def __enter__(self) -> None:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = _raw.getsignal(_SIGINT)
            if handler is signal.default_int_handler or _only_cancels(handler):
                self._before, sys.unraisablehook = sys.unraisablehook, self._on_unraisable

    def __exit__(self, *_: object) -> None:
        if self._before is not None and sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._before

    def _on_unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            _thread.start_new_thread(_interrupt_again, ())
        else:
            self._before(unraisable)


def accept_nudges() -> None:
    """Give `NUDGE` a handler that does nothing, unless it has one. Works in the main thread."""
    if signal.getsignal(NUDGE) is signal.SIG_DFL:
        signal.signal(NUDGE, lambda signum, frame: None)


def _interrupt_again() -> None:
    time.sleep(_AGAIN)
    main: Any = threading.main_thread().ident
    signal.pthread_kill(main, signal.SIGINT)


def _only_cancels(handler: Any) -> bool:
    """Return whether a handler of SIGINT belongs to an event loop: to ipykernel or `asyncio.Runner`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    module = getattr(handler, "__module__", None) or ""
    return callable(handler) and module.partition(".")[0] in ("ipykernel", "asyncio")

"""Interrupts that wait for the end of a step, such as a message, and interrupts that raise in an event loop, too."""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

#: `signal` without its enums: making these takes most of the time of a block, and a call has twenty blocks.
_raw: Any = importlib.import_module("_signal")
_SIGINT = int(signal.SIGINT)

_handler: Any = None  # the function that is to be called for them
_count = 0


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer a SIGINT in the main thread to the end of this block. A second SIGINT interrupts at once.

    Blocking the signal has no such effect: another thread of the process receives it then, and Python calls the handler
    in the main thread anyway.
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
            handler(signal.SIGINT, None)
        elif _count == 1:
            signal.raise_signal(signal.SIGINT)


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
    ends at its next `await`, and a call of nbdist in it has none.
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


def _only_cancels(handler: Any) -> bool:
    """Return whether a handler of SIGINT belongs to an event loop: to ipykernel or `asyncio.Runner`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    module = getattr(handler, "__module__", None) or ""
    return callable(handler) and module.partition(".")[0] in ("ipykernel", "asyncio")

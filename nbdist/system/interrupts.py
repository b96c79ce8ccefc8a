"""Interrupts that wait for the end of what must not be torn in two, such as a message."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_handler: Any = None  # who is to hear of them
_count = 0


@contextlib.contextmanager
def postponed_interrupts() -> Iterator[None]:
    """Postpone a SIGINT in the main thread to the end of this block; a second one interrupts at once.

    To block the signal would not do: another thread of the process takes it then, and Python calls its handler in the
    main thread all the same.
    """
    global _handler, _count
    if threading.current_thread() is not threading.main_thread():  # which never hears of any
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or handler is postpone:  # not Python's; or a block within another
        yield
        return
    _handler, _count = handler, 0
    signal.signal(signal.SIGINT, postpone)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if _count == 1 and callable(handler):
            handler(signal.SIGINT, None)
        elif _count == 1:
            signal.raise_signal(signal.SIGINT)


def postpone(signum: int, frame: Any) -> None:
    """The handler of SIGINT in such a block."""
    global _count
    _count += 1
    if _count > 1 and callable(_handler):
        _handler(signum, frame)

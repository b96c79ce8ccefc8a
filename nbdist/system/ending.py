"""The order of the end of a program: sessions and processes end before the servers that run them.

`atexit` calls the last registered function first. A server is stopped by such a function. The functions that end
sessions (`weakref.finalize`) and processes (`multiprocessing`) may have been registered before nbdist was imported:
torch registers both.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Any

_ends: list[weakref.finalize[Any, Any]] = []


def before_servers(end: weakref.finalize[Any, Any]) -> None:
    """Call `end` before a server is stopped at the end of the program, unless it was called earlier."""
    _ends[:] = [*(one for one in _ends if one.alive), end]


def last(stop: Callable[[], None]) -> Callable[[], None]:
    """Call `stop`, which stops servers, at the end of the program, after sessions and processes have ended."""

    def at_exit() -> None:
        try:
            _end_what_servers_run()
        finally:
            stop()

    atexit.register(at_exit)
    return stop


def _end_what_servers_run() -> None:
    """End sessions and processes, the newest first. As at the end of Python, wait for processes that are not
    daemons.
    """
    for name in ("multiprocessing.util", "multiprocess.util"):
        if name in sys.modules:
            sys.modules[name]._exit_function()  # does nothing when it is called again
    for end in reversed(_ends):
        end()

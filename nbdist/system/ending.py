"""The order in which things end with the program: sessions and processes before the servers that run them.

`atexit` calls the last registered function first. A server is stopped by such a function, and what ends sessions
(`weakref.finalize`) and processes (`multiprocessing`) may have been registered before nbdist was imported: both are, by
torch.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Any

_ends: list[weakref.finalize[Any, Any]] = []


def before_servers(end: weakref.finalize[Any, Any]) -> None:
    """Call `end` before a server is stopped at the end of the program, unless it has been called."""
    _ends[:] = [*(one for one in _ends if one.alive), end]


def last(stop: Callable[[], None]) -> Callable[[], None]:
    """Call `stop`, which stops servers, at the end of the program, after what they run has been ended."""

    def at_exit() -> None:
        try:
            _end_what_servers_run()
        finally:
            stop()

    atexit.register(at_exit)
    return stop


def _end_what_servers_run() -> None:
    """End sessions and processes, the newest first. Processes that are not daemons are waited for, as by Python."""
    for name in ("multiprocessing.util", "multiprocess.util"):
        if name in sys.modules:
            sys.modules[name]._exit_function()  # does nothing when it is called again
    for end in reversed(_ends):
        end()

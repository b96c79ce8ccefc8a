"""Changes of a rank's widgets in the page during a call: a thread applies them, in order.

Meanwhile the main thread runs the function, as a kernel's main thread runs a cell. A kernel's subshell handles such
messages in a thread, too.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import signal
import time
import traceback
from collections.abc import Sequence
from typing import Any

from ..notebook.rank_widgets import handle_comm_message

_events: queue.SimpleQueue[tuple[dict[str, Any], Sequence[bytes]]] = queue.SimpleQueue()
_listens = False
#: Seconds for which what is event to a widget that is not here is kept: a rank that begins a call later than others has
#: the call's widgets later, too.
PATIENCE = 10.0


def receive(content: dict[str, Any], buffers: Sequence[bytes]) -> None:
    """Queue messages of the page for the widgets. Always called by the same thread."""
    global _listens
    _events.put((content, buffers))
    if not _listens:  # most calls have no widget that anybody touches
        _listens = True
        _thread.start_new_thread(_listen, ())


def _listen() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    waiting: list[tuple[float, dict[str, Any], Sequence[bytes]]] = []
    while True:
        with contextlib.suppress(queue.Empty):
            event = _events.get(timeout=0.02 if waiting else None)
            waiting.append((time.monotonic() + PATIENCE, *event))
        waiting = [one for one in waiting if not _apply(*one[1:]) and time.monotonic() < one[0]]


def _apply(content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
    """Pass a message to its widget; return False if it must be tried again later."""
    try:
        return handle_comm_message(content, buffers)
    except Exception:  # of a handler: the next one may be another's
        traceback.print_exc()
        return True

"""The user's own modules: those that are not installed, and may be edited and reloaded while the notebook runs."""

from __future__ import annotations

import os
import sys
import threading
import types
import zlib
from typing import Any

from ..notebook.shell import autoreloaded
from ..system.interpreter import INSTALLED
from .foreign import contents

_PACKAGE = __name__.partition(".")[0]
_lock = threading.Lock()
_seen: set[str] = set()
_state: tuple[int, str] = 0, ""
_executed: dict[str, tuple[Any, int]] = {}  # by name: what changes with each execution, and the source's checksum


def own_sources() -> dict[str, int]:
    """The checksum of the source that this process has executed, for each of the user's own modules that it has."""
    global _state
    with _lock:
        state = len(sys.modules), next(reversed(sys.modules))  # what is new, or was executed again, comes last
        for name in sys.modules.keys() - _seen if state != _state else ():
            _seen.add(name)
            if own_file(sys.modules.get(name), name):
                _executed[name] = None, 0
        _state = state
        for name, (before, executed) in list(_executed.items()):
            module = sys.modules.get(name)
            file = own_file(module, name)
            if file is None:
                del _executed[name]
                _seen.discard(name)
                continue
            # `reload` gives a module another spec. IPython's %autoreload may put new code into it without that.
            spec, reloaded = contents(module).get("__spec__"), autoreloaded(name)
            if before is None or spec is not before[0] or before[1] not in (None, reloaded):
                executed = checksum(file)
            _executed[name] = (spec, reloaded), executed
        return {name: executed for name, (_, executed) in _executed.items()}


def own_file(module: types.ModuleType | None, name: str) -> str | None:
    """The source file of one of the user's own modules; None for any other."""
    file = contents(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py") or file.startswith(INSTALLED) or not os.path.isabs(file):
        return None
    return None if name in ("__main__", "__mp_main__") or name.partition(".")[0] == _PACKAGE else file


def checksum(file: str) -> int:
    """That of a source; 0 where there is none."""
    try:
        with open(file, "rb") as source:
            return zlib.crc32(source.read())
    except OSError:
        return 0

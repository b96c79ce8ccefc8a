"""The user's own modules: modules that are not installed, and may be edited and reloaded while the notebook runs."""

from __future__ import annotations

import os
import sys
import threading
import types
import zlib
from typing import Any, NamedTuple

from ..notebook.shell import after_each_cell, autoreloaded
from ..system.source_files import is_of_environment
from .foreign import PLAIN, contents, copied, is_a

_CODE = (types.FunctionType, type, types.ModuleType)
_PACKAGE = __name__.partition(".")[0]
_lock = threading.Lock()
_seen: set[str] = set()
_state: tuple[int, str] = 0, ""
_follows_cells = False


class _Executed(NamedTuple):
    """The source of a module at the time when this process executed it."""

    spec: Any
    """The module's spec at that time. `reload` replaces it."""
    read: float | None
    """The modification time of the file when %autoreload last read it; None if it has not."""
    file: str
    checksum: int
    moment: int
    """The place of the module in the order in which modules were executed."""


_moment = 0
_executed: dict[str, _Executed | None] = {}


def own_sources() -> dict[str, tuple[str, int, int]]:
    """Return, for each of the user's own modules in this process, the source that was executed: file, checksum, and
    its place in the order in which these modules were executed.

    The sources of a notebook are also read at the end of each cell, because they may be edited before the next call.
    """
    global _state, _follows_cells, _moment
    with _lock:
        if not _follows_cells:
            _follows_cells = after_each_cell(own_sources)
        state = len(sys.modules), next(reversed(sys.modules))  # what is new, or was executed again, comes last
        for name in sys.modules.keys() - _seen if state != _state else ():
            _seen.add(name)
            if own_file(sys.modules.get(name), name):
                _executed[name] = None
        _state = state
        sources: dict[str, tuple[str, int, int]] = {}
        new: dict[str, _Executed] = {}
        for name, before in list(_executed.items()):
            module = sys.modules.get(name)
            file = own_file(module, name)
            if file is None:
                del _executed[name]
                _seen.discard(name)
                continue
            # `reload` gives a module another spec. IPython's %autoreload may put new code into it without that; it has
            # read a new module when the cell was over.
            spec, read = contents(module).get("__spec__"), autoreloaded(name)
            now = before
            if now is None or spec is not now.spec or file != now.file or read not in (None, now.read):
                now = _Executed(spec, modified(file) if read is None else read, file, checksum(file), 0)
                new[name] = now
            _executed[name] = now
            sources[name] = file, now.checksum, now.moment
        for name in [name for name in sys.modules if name in new] if new else ():  # Python puts what it executes last
            _moment += 1
            _executed[name] = now = new[name]._replace(moment=_moment)
            sources[name] = now.file, now.checksum, now.moment
        return sources


def objects_of_own_modules() -> dict[int, list[tuple[str, str]]]:
    """Return, by the ids of the objects in the user's own modules, their places: module and attribute. Functions,
    classes and modules are left out."""
    places: dict[int, list[tuple[str, str]]] = {}
    for module in own_sources():
        for name, value in copied(sys.modules.get(module)).items():
            if type(value) not in PLAIN and not is_a(value, _CODE) and not name.startswith("__"):
                places.setdefault(id(value), []).append((module, name))
    return places


def own_file(module: types.ModuleType | None, name: str) -> str | None:
    """Return the source file of one of the user's own modules; None for any other module."""
    file = contents(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py") or is_of_environment(file) or not os.path.isabs(file):
        return None
    return None if name in ("__main__", "__mp_main__") or name.partition(".")[0] == _PACKAGE else file


def checksum(file: str) -> int:
    """Return the checksum of a source file; 0 if there is no file."""
    try:
        with open(file, "rb") as source:
            return zlib.crc32(source.read())
    except OSError:
        return 0


def modified(file: str) -> float | None:
    """Return the modification time of a file, as %autoreload computes it; None if there is no file."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return None


def version(file: str) -> tuple[int, ...]:
    """Return the version of a file: device, inode, size in bytes, modification time (ns); empty if there is no file.

    So the version also changes if an older file replaces the file.
    """
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

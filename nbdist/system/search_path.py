"""Module search paths for other processes, in which a project's `queue.py` does not hide Python's own."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterable, Sequence

from .source_files import is_installed, is_standard

_warned = False


def working_folder() -> str:
    """Return the working folder. If no process can start there, return the folder for temporary files, with a
    warning."""
    global _warned
    lost = ""
    try:
        folder = os.getcwd()
        if not os.access(folder, os.X_OK):
            lost = "cannot be entered by this user"
    except FileNotFoundError:
        lost = "no longer exists"
    if lost:
        folder = tempfile.gettempdir()
        if not _warned:
            text = f"the notebook's working folder {lost}, so ranks work in {folder}. Go to another one: %cd"
            warnings.warn(text, stacklevel=2)
    _warned = bool(lost)
    return folder


def search_path() -> list[str]:
    """Return `sys.path` for another process: only strings, and relative folders as absolute paths, as Python resolved
    them here.

    An empty string is the working folder. It is left out if this folder no longer exists.
    """
    folder = ""
    if "" in sys.path:
        with contextlib.suppress(FileNotFoundError):
            folder = os.getcwd()
    texts = (part or folder for part in sys.path if isinstance(part, str))
    return [part if part[0] == os.sep else _used(part) for part in texts if part]


def _used(part: str) -> str:
    """Return the folder that an entry of `sys.path` meant when Python first used it."""
    found = part if os.path.isabs(part) else getattr(sys.path_importer_cache.get(part), "path", part)
    return found if isinstance(found, str) else part


def standard_first(path: Iterable[str]) -> list[str]:
    """Return a search path with Python's own modules first, then installed ones, then all others.

    A kernel has imported `queue` before a project with a `queue.py` enters its `sys.path`. A process that has that path
    from the start would import the project's.
    """

    return sorted(path, key=lambda part: 1 if is_installed(part) else 0 if _is_standard(part) else 2)


def _is_standard(path: str) -> bool:
    """Return whether a path is in the standard library, or is the archive that it may lie in."""
    return is_standard(path) or re.fullmatch(r"python3\d+\.zip", os.path.basename(path)) is not None


def shadowed(path: Iterable[str]) -> list[str]:
    """Return the standard modules in this process that another process would first find elsewhere on `path`."""
    found: set[str] = set()
    for part in path:
        if _is_standard(part):
            break
        if not is_installed(part):
            with contextlib.suppress(OSError):
                found |= _standard_names_in(part, os.stat(part).st_mtime_ns)
    return sorted(name for name in found if _is_from_there(sys.modules.get(name)))


@functools.lru_cache(maxsize=256)
def _standard_names_in(folder: str, changed: int) -> frozenset[str]:
    """Return the names of standard modules among the files in a folder, which was last `changed` at this time."""
    return sys.stdlib_module_names.intersection(name.partition(".")[0] for name in os.listdir(folder))


def _is_from_there(module: types.ModuleType | None) -> bool:
    """Return whether a module, if it is loaded, is built in or from the standard library."""
    file = getattr(module, "__file__", None)
    return module is not None and (file is None or _is_standard(file))


class StandardFinder(importlib.abc.MetaPathFinder):
    """A finder of standard modules that the notebook has, even if a project has files with these names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        return importlib.machinery.PathFinder.find_spec(name, standard_first(sys.path), target)

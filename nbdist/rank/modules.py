"""The notebook's modules in a rank: found where the notebook found them, and as new as there."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
import types
import warnings
from collections.abc import Mapping, Sequence

from ..capture.modules import checksum, own_file
from ..errors import NbdistError
from ..notebook.shell import reloader


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that the kernel has loaded from places that are not on `sys.path` (pytest does so)."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str | None, list[str] | None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.places:
            return None
        file, folders = self.places[name]
        if file is None:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = folders
            return spec
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)


class Reloader(importlib.abc.MetaPathFinder):
    """Executes those of the user's own modules again that were edited since this rank has imported them.

    A module that the notebook has, too, is taken as the notebook has it: edited and not reloaded there, it stays as it
    is here. As a finder it finds nothing, but knows when each module was imported.
    """

    def __init__(self) -> None:
        self._imported: dict[str, int] = {}  # by name: when, as `_now` has it
        self._sources: dict[str, int] = {}  # as the notebook had them at the last call

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> None:
        self._imported[name] = _now()

    def refresh(self, sources: Mapping[str, int]) -> None:
        """Bring modules up to date before a call, `sources` as `own_sources` has them in the notebook.

        Raises `NbdistError` where the file that is here is not what the notebook has loaded.
        """
        files = {name: file for name in self._imported if (file := own_file(sys.modules.get(name), name)) is not None}
        self._imported = {name: self._imported[name] for name in files}
        # Those that were imported last first: what a module imports comes after it.
        for name, file in reversed(files.items()):
            wanted = sources.get(name)
            has, edited = self._sources.get(name), _changed_since(file, self._imported[name])
            if edited and wanted in (None, checksum(file)):
                self._reload(name)
                self._sources.pop(name, None)
            elif wanted is not None and (edited if has is None else has != wanted):
                raise NbdistError(
                    f"the module {name!r} was edited and reloaded in the notebook, and is stale in this rank, which "
                    f"has {file} in another version: reload it in the notebook once more, or bring the file to where "
                    f"the rank runs; or else restart() the session"
                )
        self._sources = dict(sources)  # also of what this call will import

    def _reload(self, name: str) -> None:
        importlib.invalidate_caches()
        reload, now = reloader(), _now()
        reload(sys.modules[name])
        self._imported[name] = now


def import_beside(names: Sequence[str]) -> None:
    """Import what nobody has asked for in so many words, such as fastai's patches: a warning says where that fails."""
    for name in names:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception as exc:
                warnings.warn(
                    f"{name}, which the notebook has imported, cannot be imported in this rank "
                    f"({type(exc).__name__}: {exc})",
                    stacklevel=2,
                )


def _now() -> int:
    """Nanoseconds since the epoch, by the clock that files are stamped with: on Linux, one that moves in ticks."""
    coarse = 5  # CLOCK_REALTIME_COARSE, for which Python has no name
    return time.clock_gettime_ns(coarse) if sys.platform == "linux" else time.time_ns()


def _changed_since(file: str, moment: int) -> bool:
    """Whether a file was written since, as `_now` has it."""
    try:
        return os.stat(file).st_mtime_ns >= moment
    except OSError:
        return False

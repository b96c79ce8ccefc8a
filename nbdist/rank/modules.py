"""The notebook's modules in a rank: found at the notebook's places, and in the notebook's version."""

from __future__ import annotations

import contextlib
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
from typing import NamedTuple

from ..capture.modules import checksum, own_file, version
from ..errors import NbdistError
from ..notebook.shell import reloader
from ..system.interrupts import undivided
from .module_imports import imported_first, imports_of

#: The file of a module, and the folders of its sub-modules.
Place = tuple[str | None, list[str] | None]


class SourceFinder(importlib.abc.MetaPathFinder):
    """A finder of modules that the kernel has loaded from places outside its `sys.path`, as pytest does, or before
    the notebook changed its working folder.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}

    def update(self, places: Mapping[str, Place], sources: Mapping[str, tuple[str, int, int]]) -> None:
        """Adopt the `places` of a call. Earlier places stay, unless `sources` show that the notebook now has the module
        from another place."""
        for name, (file, _, _) in sources.items():
            if name in self.places and self.places[name][0] != file:
                del self.places[name]
        self.places.update(places)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.places:
            return None
        file, folders = self.places[name]
        if not any(map(os.path.exists, [file] if file else folders or [])):
            return None  # the rank runs on another machine
        if file is None:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = folders
            return spec
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)


class _Imported(NamedTuple):
    """A module that this rank has executed: the time by `_now`, and the source."""

    moment: int
    version: tuple[int, ...] = ()
    checksum: int | None = None
    """The source is None if it is not known, because the file was changed at that time or later."""


class Reloader(importlib.abc.MetaPathFinder):
    """A reloader of the user's own modules, which executes a module again when its source has changed since.

    A module that the notebook has, too, is executed again only if the notebook has reloaded it. The reloader is also in
    `sys.meta_path`, where it finds nothing but records when each module was imported.
    """

    def __init__(self) -> None:
        self._imported: dict[str, _Imported] = {}
        self._new: list[str] = []  # modules with nothing known but the moment
        self._sources: Mapping[str, tuple[str, int, int]] = {}  # as the notebook had them at the last call
        self._behind: dict[str, int] = {}
        """Modules that import a module which was executed again after them, with the notebook's number of that."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> None:
        self._imported[name] = _Imported(_now())
        self._new.append(name)

    @undivided("reads the sources of modules")
    def look(self) -> None:
        """Check the sources of recently imported modules, and show which differ from the notebook's."""
        new, self._new = self._new, []
        for name in new:
            file = own_file(sys.modules.get(name), name)
            imported = self._imported.pop(name, None)
            if file is None or imported is None:
                continue
            now, executed = version(file), checksum(file)
            unchanged = not _changed_since(file, imported.moment)
            self._imported[name] = _Imported(imported.moment, now, executed if unchanged else None)
            its, wanted = self._sources.get(name, (file, executed))[:2]
            if unchanged and wanted != executed:
                what = "was edited after the notebook had imported it" if _same_file(its, file) else f"is not {its}"
                _notify(
                    f"nbdist: the module {name!r} is another one here than in the notebook: {file} {what}. "
                    f"importlib.reload({name}) in the notebook makes them one\n"
                )

    @undivided("executes edited modules again")
    def refresh(self, sources: Mapping[str, tuple[str, int, int]]) -> bool:
        """Update modules before a call, and return whether any was executed again; `sources` is the notebook's
        `own_sources`.

        Raises `NbdistError` if the file here differs from the one that the notebook has loaded.
        """
        self.look()
        edits: dict[str, tuple[tuple[int, ...], int]] = {}
        for name, imported in list(self._imported.items()):
            file = own_file(sys.modules.get(name), name)
            if file is None:
                self._imported.pop(name, None)
                self._behind.pop(name, None)
                continue
            its, wanted = sources.get(name, (file, None))[:2]
            if not _same_file(its, file) and os.path.isfile(its):
                self._forget(name)  # it is imported when it is needed, from where the notebook has it
                continue
            now = version(file)
            if not now and wanted is None and _is_elsewhere(name, file):
                self._forget(name)
                continue
            if not now or (now == imported.version and imported.checksum is not None):
                edited = False
            else:
                edited = (found := checksum(file)) != imported.checksum
                if not edited:
                    self._imported[name] = imported._replace(version=now)
                elif wanted in (None, found):
                    edits[name] = now, found
                    continue
            had = self._sources.get(name)
            if wanted is not None and (edited if had is None else had[1] != wanted) and imported.checksum != wanted:
                raise NbdistError(
                    f"the module {name!r} was edited and reloaded in the notebook, and is stale in this rank, which "
                    f"has a different version of {file}: reload it there once more, or copy the file to where "
                    f"the rank runs; or else restart() the session"
                )
        for name in sources.keys() - self._imported.keys():  # such as a `statistics.py`, which the server has as well
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if module is not None and not _same_file(sources[name][0], file or "") and os.path.isfile(sources[name][0]):
                self._forget(name)
        self._sources = dict(sources)  # also of what this call will import
        return self._execute_again(edits, sources)

    def _execute_again(
        self, edits: Mapping[str, tuple[tuple[int, ...], int]], sources: Mapping[str, tuple[str, int, int]]
    ) -> bool:
        """Execute edited modules again, after what they import, and modules that import them.

        A module that imports an edited one, and that the notebook has, is executed again only once the notebook has
        done that. Returns whether any was.
        """

        def moment(name: str) -> int:
            return sources[name][2] if name in sources else 0

        def due(name: str) -> bool:
            return name in edits or (
                name in self._behind and (name not in sources or moment(name) > self._behind[name])
            )

        if not edits and not any(map(due, self._behind)):
            return False
        imports = imports_of(self._imported)
        order = imported_first(imports)
        for place, name in enumerate(order):
            if due(name):
                imported = self._imported[name]
                self._reload(name, *edits.get(name, (imported.version, imported.checksum)))
                for other in order[place + 1 :]:  # not an earlier one, which would be executed again at each call
                    if name in imports[other]:
                        self._behind[other] = max(moment(name), self._behind.get(other, 0))
        return True

    def _reload(self, name: str, now: tuple[int, ...], executed: int | None) -> None:
        self._behind.pop(name, None)
        importlib.invalidate_caches()
        moment = _now()
        reloader()(sys.modules[name])
        self._new = [new for new in self._new if new != name]
        self._imported[name] = _Imported(moment, now, executed)

    def _forget(self, name: str) -> None:
        """Remove a module and its submodules from the imported ones."""
        for one in [one for one in sys.modules if one == name or one.startswith(name + ".")]:
            del sys.modules[one]
            self._imported.pop(one, None)
            self._behind.pop(one, None)


def _is_elsewhere(name: str, gone: str) -> bool:
    """Return whether an import finds a module, whose file is gone, at another place: a package may have replaced it."""
    importlib.invalidate_caches()
    parent = sys.modules.get(name.rpartition(".")[0])
    found = importlib.machinery.PathFinder.find_spec(name, getattr(parent, "__path__", None))
    return found is not None and found.origin not in (None, gone)


def import_beside(names: Sequence[str]) -> None:
    """Import modules that no code of the call names, such as fastai's patches; a warning names an import that fails."""
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


def _notify(text: str) -> None:
    """Write a text to standard error. A warning could become an error by the notebook's filters, after the call."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _now() -> int:
    """Return nanoseconds since 1970 by the clock of file times, which on Linux advances in ticks."""
    coarse = 5  # CLOCK_REALTIME_COARSE, for which Python has no name
    return time.clock_gettime_ns(coarse) if sys.platform == "linux" else time.time_ns()


def _changed_since(file: str, moment: int) -> bool:
    """Return whether a file was written or replaced since a time of `_now`.

    A time in the future comes from another clock, such as a file server's. From Linux 6.13 on, a file whose time was
    read before gets its next time from a finer clock.
    """
    try:
        found = os.stat(file)
    except OSError:
        return False
    now = time.time_ns()
    return any(moment <= stamp <= now for stamp in (found.st_mtime_ns, found.st_ctime_ns))


def _same_file(one: str, other: str) -> bool:
    """Return whether two names lead to one file; False if that is unknown."""
    with contextlib.suppress(OSError):
        return one == other or os.path.samefile(one, other)
    return False

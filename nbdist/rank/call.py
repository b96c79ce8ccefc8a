"""A call in a rank: it sets the notebook's names and objects, and runs the function."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from ..capture import imports
from ..capture.diagnosis import explain_unreadable
from ..capture.per_rank import own
from ..capture.reading import Unreadable, read
from ..notebook.shell import label_cells
from ..replay import target
from ..wire.messages import Header
from ..wire.parcel import Parcel
from ..wire.protocol import Call
from . import shell, spawning
from .modules import Reloader, SourceFinder, import_beside
from .python_functions import PythonFunctions
from .settings import Settings
from .world import seed_everything


class Caller:
    """A runner of calls, which also keeps the objects that calls have sent."""

    def __init__(self) -> None:
        self.sent: set[tuple[str, str]] = set()
        """The globals that the notebook already has, so that a value is sent back without them."""
        self.originals: list[Any] = []
        """The notebook's functions and classes, by their numbers in the notebook."""
        self._finder, self._reloader, self._settings = SourceFinder(), Reloader(), Settings()
        self.python_functions: PythonFunctions

    def install(self) -> None:
        """Install the finder and the reloader for the notebook's modules, and make spawned processes receive the
        notebook's definitions."""
        sys.meta_path[:0] = [self._reloader, self._finder]
        spawning.install()
        self.python_functions = PythonFunctions()

    def run(self, call: Call, parcel: Parcel) -> Any:
        """Run the function, and return its value."""
        os.environ.update(call.restarts)
        target.seeds = call.seeds
        if call.seeds is not None:
            seed_everything(call.seeds)
        fn, args, kwargs = self.take(call.header, parcel, f"rank {os.environ['RANK']}")
        positional = [own(value, call.place) for value in args]
        named = {name: own(value, call.place) for name, value in kwargs.items()}
        del args, kwargs
        try:
            with checked(call.check), self.python_functions:
                return fn(*positional, **named)
        finally:
            shell.after_call()
            self._reloader.look()

    def take(self, pickled_header: bytes, parcel: Parcel, where: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Set the names and objects of a call, and return the function and its arguments.

        Raises `CaptureError` for an object that cannot be read here. `where` is the name of the reader in the error.
        """
        header: Header = pickle.loads(pickled_header)
        self._finder.update(header.places, header.own_sources)
        for name, source in header.sources.items():
            imports.keep_source(name, source)
        label_cells(header.cells)
        for name in header.gone:
            if ("__main__", name) in self.sent:
                self.sent.discard(("__main__", name))
                vars(shell.main).pop(name, None)
        self._settings.follow(header.settings)
        if self._reloader.refresh(header.own_sources):
            self._settings.apply_again("patches")
        given: set[str] = set()

        def keep(key: str, namespace: dict[str, Any], name: str) -> bool:
            self.sent.add((key, name))
            return not (key == "__main__" and name in given)

        before = len(sys.modules)  # modules first: some change what settings set
        import_beside(header.imported_alongside)
        with contextlib.suppress(Exception):  # it is raised again where the module is used
            for name in header.modules:
                importlib.import_module(name)
        if len(sys.modules) > before:
            self._settings.set_again()
        self._settings.apply(header.settings, keep)
        given |= imports.run_imports(header.imports, vars(shell.main)) - header.need
        pickled, buffers = parcel.open()
        try:
            _, fn, args, kwargs, self.originals = read(pickled, buffers, originals=[], keep=keep)
        except Unreadable as exc:
            raise explain_unreadable(exc, where) from exc.__cause__
        for name, places in header.in_modules.items():
            for module, attribute in places:
                if module in sys.modules and name in vars(shell.main):
                    setattr(sys.modules[module], attribute, vars(shell.main)[name])
        return fn, args, kwargs


def checked(checks: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Make the checks of a call in the `with` block, if the call asks for any."""
    if not checks:
        return contextlib.nullcontext()
    from ..numerics.call import checked  # imports torch

    return checked(checks)

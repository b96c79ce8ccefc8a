"""Actions on modules as soon as they have been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder that calls each of `actions`, given by module name, with its module: immediately if the module is
    imported already, otherwise after its import.

    It sees later imports while it is in `sys.meta_path`, where it must be the first finder.
    """

    def __init__(self, actions: Mapping[str, Callable[[types.ModuleType], Any]]) -> None:
        self._awaited = dict(actions)
        for name in [name for name in actions if name in sys.modules]:
            self._awaited.pop(name)(sys.modules[name])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the modules with the other finders, and add the action to its import. Return None for any other
        module."""
        action = self._awaited.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)  # of the finders after this one
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

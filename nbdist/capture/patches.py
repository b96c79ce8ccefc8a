"""Patches: functions and values that the notebook has put into modules and classes (fastcore's `@patch`)."""

from __future__ import annotations

import abc
import functools
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from ..notebook.shell import shell
from .assigned import NO_LIBRARIES, Assigned, Patch
from .foreign import PLAIN, contents, copied, is_a, text
from .names import importable
from .need import main_namespace
from .new_cells import NewCells
from .refusals import Refusals

#: The attributes that name a class.
_OF_A_CLASS = ("__module__", "__qualname__")
#: Types of values in classes that hold nothing of the notebook's.
_HOLD_NOTHING = PLAIN | {tuple, list, dict, set, frozenset, type, abc.ABCMeta}
#: Code that may put something into a class or module. Assignments to `self` do not.
_MAY_PATCH = re.compile(
    r"@patch|patch_to|setattr\(|_accessor\(|register_\w+|^\s*(?!self\.)\w+(\.\w+)*\.\w+\s*=[^=]", re.MULTILINE
)


class Patches:
    """Finder of patches. It searches all classes and modules only after cells have run that may patch. Attributes that
    cells assign by name are read at each call."""

    def __init__(self) -> None:
        self._cells = NewCells()
        self._wary = False
        self._found: list[Patch] = []
        self._changed = False  # by the last search
        self._refusals = Refusals()
        self._assigned = Assigned()

    def find(self) -> list[Patch]:
        """Return the patches that can be sent; a warning names, once, each one that cannot."""
        if self._may_have():
            before, self._found = self._found, list(_search())
            self._changed = {id(value) for _, _, value in before} != {id(value) for _, _, value in self._found}
        holding = [(owner, name, value) for owner, name, value in self._found if contents(owner).get(name) is value]
        found = {(id(owner), name): (owner, name, value) for owner, name, value in (*holding, *self._assigned.find())}
        # A class that no import gives travels by value, with all that it has, or not at all.
        patches = [patch for patch in found.values() if not is_a(patch[0], type) or importable(patch[0])]
        return self._refusals.without(patches, place)

    def _may_have(self) -> bool:
        """Return whether a search may find other patches than the last one."""
        new = self._cells.take()
        if not new:
            return self._wary and _MAY_PATCH.search(self._cells.passed(self._changed)) is not None
        of_script = "_ih" not in getattr(shell(), "user_ns", {})  # it is searched whatever it says
        self._wary = self._wary or of_script or any(_MAY_PATCH.search(cell) for cell in new)
        return self._wary


def place(patch: Patch) -> str:
    """Return the name of the attribute, for messages."""
    owner, name, _ = patch
    return ".".join([*(text(owner, part) for part in (_OF_A_CLASS if is_a(owner, type) else ["__name__"])), name])


def _search() -> Iterator[Patch]:
    main = main_namespace()
    for name, module in list(sys.modules.items()):
        if is_a(module, types.ModuleType) and name not in NO_LIBRARIES:
            for attribute, value in copied(module).items():
                if type(value) is types.FunctionType and value.__globals__ is main:
                    yield module, attribute, value
    for cls in classes():
        if text(cls, "__module__") != "__main__":
            for name, value in copied(cls).items():
                kind = type(value)  # here, not in a function: there are half a million
                if kind is types.FunctionType:
                    if value.__globals__ is main:
                        yield cls, name, value
                elif kind not in _HOLD_NOTHING and _is_own(value, main):
                    yield cls, name, value


def classes() -> Iterator[type]:
    """Yield all classes of this process except `object`."""
    seen, found = {id(object)}, [object]  # by id: a metaclass has its own idea of hashes
    while found:
        for cls in type.__subclasses__(found.pop()):
            if id(cls) not in seen:
                seen.add(id(cls))
                found.append(cls)
                yield cls


def _is_of(value: Any, main: dict[str, Any]) -> bool:
    return type(value) is types.FunctionType and value.__globals__ is main


def _is_own(value: Any, main: dict[str, Any]) -> bool:
    if type(value) in (classmethod, staticmethod):
        return _is_of(value.__func__, main)
    if type(value) is property:
        return _is_of(value.fget, main) or _is_of(value.fset, main)
    if type(value) is functools.partialmethod:
        return _is_of(value.func, main)
    # As the accessors of pandas keep it, and the namespaces of polars. Not getattr: what six puts into classes imports
    # modules when it is asked.
    held = () if is_a(value, type) else contents(value).values()
    return any(is_a(one, type) and text(one, "__module__") == "__main__" for one in held)

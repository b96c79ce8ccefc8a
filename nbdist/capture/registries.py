"""Registries: containers of libraries into which the notebook has put functions and classes of its own.

Examples: `copyreg.pickle(Odd, reduce)`, `numbers.Number.register(Money)`, a function under a library's
`singledispatch`, a constructor of YAML, a file system of fsspec, a node of torch's pytrees.
"""

from __future__ import annotations

import abc
import collections
import copy
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .assigned import NO_LIBRARIES
from .foreign import contents, is_a, text
from .names import importable
from .need import NewCells, main_namespace
from .patches import PLAIN, classes
from .refusals import Refusals

_CONTAINERS = frozenset([dict, list, set, collections.OrderedDict, collections.defaultdict])
#: Packages whose containers have their own way, or are of the notebook's machinery.
_NEVER = {"IPython", "ipykernel", "traitlets", "warnings", "cloudpickle", __name__.partition(".")[0]}
#: Code that may put something into a registry.
_MAY_REGISTER = re.compile(r"regist|\badd_|_hook\b|copyreg|implements")
_FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
_MISSING = object()


class Entry(NamedTuple):
    """An entry of a registry."""

    owner: type | types.ModuleType
    name: str
    """The name of an attribute of the owner: a dict, list or set, or a function under `singledispatch`. Empty for an
    abstract class, where `value` is the registered class."""
    key: Any
    """The key of the entry. None in a list and a set."""
    value: Any

    def place(self) -> str:
        """Return the name of the registry, for messages."""
        parts = [text(self.owner, "__module__"), text(self.owner, "__qualname__")]
        if not is_a(self.owner, type):
            parts = [text(self.owner, "__name__")]
        return ".".join([*parts, self.name] if self.name else parts)


class Registries:
    """Finder of entries. When new cells may register something, it searches all modules and classes."""

    def __init__(self) -> None:
        self._cells = NewCells()
        self._functions: set[str] = set()
        """The functions that are defined in cells and may register something: a later cell may call them."""
        self._found: list[Entry] = []
        self._refusals = Refusals()

    def find(self) -> list[Entry]:
        """Return the notebook's entries in registries of libraries that can be sent. Each registry with an entry that
        cannot be sent is named in one warning."""
        new = self._cells.take()
        if any(self._may_register(cell) for cell in new):
            found: dict[tuple[int, ...], Entry] = {}
            for entry in _search():
                found.setdefault(_key(entry), entry)
            self._found = [*found.values()]
        return self._refusals.without([entry for entry in self._found if _holds(entry)], Entry.place)

    def _may_register(self, cell: str) -> bool:
        if _MAY_REGISTER.search(cell):
            self._functions.update(_FUNCTION.findall(cell))
            return True
        return not self._functions.isdisjoint(re.findall(r"\w+", cell))


def enter(entry: Entry) -> Callable[[], object]:
    """Put an entry into its registry, and return the function that takes it out again."""
    if not entry.name:
        entry.owner.register(entry.value)  # type: ignore[union-attr]
        return lambda: None  # Python has no way back
    if is_a(entry.owner, type) and entry.name not in vars(entry.owner):  # as YAML copies a base's at the first entry
        setattr(entry.owner, entry.name, copy.copy(getattr(entry.owner, entry.name)))
    registry = vars(entry.owner)[entry.name]
    if isinstance(registry, types.FunctionType):
        registry.register(entry.key, entry.value)  # type: ignore[attr-defined]
        return lambda: None
    if isinstance(registry, set):
        registry.add(entry.value)
        return functools.partial(registry.discard, entry.value)
    if isinstance(registry, list):
        registry.append(entry.value)
        return functools.partial(registry.remove, entry.value)
    before = registry.get(entry.key, _MISSING)
    registry[entry.key] = entry.value
    if before is _MISSING:
        return functools.partial(registry.pop, entry.key, None)
    return functools.partial(registry.__setitem__, entry.key, before)


def _key(entry: Entry) -> tuple[int, ...]:
    """Return a key that identifies an entry. It is the same for a container that is found in two modules."""
    container = contents(entry.owner).get(entry.name, entry.owner)
    return id(container), id(entry.key), id(entry.value)


def _holds(entry: Entry) -> bool:
    if not entry.name:
        return True
    registry: Any = contents(entry.owner).get(entry.name)
    if type(registry) is types.FunctionType:
        registry = contents(registry).get("registry", {})
    if is_a(registry, (dict, types.MappingProxyType)):
        return registry.get(entry.key) is entry.value
    return is_a(registry, (list, set)) and any(value is entry.value for value in registry)


def _search() -> Iterator[Entry]:
    main, never = main_namespace(), _NEVER | NO_LIBRARIES
    owners = [(name, module) for name, module in list(sys.modules.items()) if is_a(module, types.ModuleType)]
    for name, module in owners:
        if name.partition(".")[0] not in never:
            yield from _of_owner(module, main)
    for cls in classes():
        if text(cls, "__module__").partition(".")[0] not in never:
            found = [*_of_owner(cls, main), *(_of_abstract(cls, main) if is_a(cls, abc.ABCMeta) else ())]
            if found and importable(cls):  # which takes longer than the rest
                yield from found


def _of_owner(owner: Any, main: dict[str, Any]) -> Iterator[Entry]:
    for name, found in list(contents(owner).items()):
        if type(found) in _CONTAINERS:
            for key, value in _items(found):
                # Numbers are of handles: each process counts its own.
                if type(key) is int or (type(value) in PLAIN and type(key) in PLAIN):
                    continue
                if _is_own(value, main) or _is_own(key, main):
                    yield Entry(owner, name, key, value)
        elif type(found) is types.FunctionType and is_a(owner, types.ModuleType):
            registry = contents(found).get("registry")
            if type(registry) is types.MappingProxyType and "register" in contents(found):
                for cls, fn in list(registry.items()):
                    if _is_of_notebook(cls, main) or _is_of_notebook(fn, main):
                        yield Entry(owner, name, cls, fn)


def _of_abstract(cls: Any, main: dict[str, Any]) -> Iterator[Entry]:
    from _abc import _get_dump  # as cloudpickle does it

    for reference in _get_dump(cls)[0] if "_abc_impl" in contents(cls) else ():
        registered = reference()
        if _is_of_notebook(registered, main):
            yield Entry(cls, "", None, registered)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return list(container.items()) if is_a(container, dict) else [(None, value) for value in list(container)]


def _is_own(value: Any, main: dict[str, Any]) -> bool:
    """Return whether a value or key belongs to the notebook, or is a tuple that contains something of the notebook."""
    if is_a(value, tuple):
        return any(_is_of_notebook(part, main) for part in tuple.__iter__(value))
    return _is_of_notebook(value, main)


def _is_of_notebook(value: Any, main: dict[str, Any]) -> bool:
    kind = type(value)
    if kind is types.FunctionType:
        return value.__globals__ is main
    return issubclass(kind, type) and contents(value).get("__module__") == "__main__"

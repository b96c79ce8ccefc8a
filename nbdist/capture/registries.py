"""Registries: containers of libraries into which the notebook has put functions and classes of its own.

Examples: `copyreg.pickle(Odd, reduce)`, `numbers.Number.register(Money)`, a function under a library's
`singledispatch`, a constructor of YAML, a file system of fsspec, a node of torch's pytrees, a resolver of OmegaConf, an
environment of gymnasium, an extension type of pandas, a model of transformers, a component of spaCy, a function under
`torch.fx.wrap`.
"""

from __future__ import annotations

import abc
import collections
import copy
import functools
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from .assigned import NO_LIBRARIES
from .foreign import PLAIN, contents, copied, is_a, text
from .names import importable
from .need import main_namespace
from .new_cells import NewCells
from .patches import classes
from .refusals import Refusals
from .registered_names import RegisteredNames, may_be

_CONTAINERS = frozenset([dict, list, set, collections.OrderedDict, collections.defaultdict])
#: Packages whose containers have their own way, are of the notebook's machinery, or hold what runs in this process.
_NEVER = {"IPython", "ipykernel", "ipywidgets", "comm", "traitlets", "zmq", "tornado", __name__.partition(".")[0]}
_NEVER |= {"warnings", "logging", "cloudpickle", "asyncio", "threading", "multiprocessing"}
_NEVER |= {"_frozen_importlib", "_frozen_importlib_external"}
#: Code that may put something into a registry.
_MAY_REGISTER = re.compile(
    r"regist|\badd_|_hook\b|copyreg|implements|\bwrap\b|set_extension|\bconfigure\(|\.define\("
    r"|^\s*@(?!torch|functools|contextlib|dataclasses|abc|typing)\w+\.\w+\(",
    re.MULTILINE,
)
#: Types of values in containers that hold nothing of the notebook's.
_HOLD_NOTHING = PLAIN | _CONTAINERS | {frozenset, range, re.Pattern, types.ModuleType}
_FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
_MISSING = object()
#: Returns 0 for a type whose instances have no `__dict__`.
_dict_offset = type.__dict__["__dictoffset__"].__get__
#: Types of most of what is in modules and classes, and is no registry.
_USUAL = PLAIN | {type, abc.ABCMeta, types.ModuleType}
#: Types of other objects in modules that are no registries, with derived types: those with weak references are caches.
_NO_REGISTRIES = (type, types.ModuleType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
#: Where `torch.fx.wrap` keeps the names of functions that a trace calls, each with the id of its namespace.
_LEAVES = "_wrapped_fns_to_patch"


class Entry(NamedTuple):
    """An entry of a registry."""

    owner: type | types.ModuleType
    name: str
    """The name of an attribute of the owner: a dict, list or set, or a function under `singledispatch`; "owner.items"
    for one of an object. Empty for an abstract class, where `value` is the registered class."""
    key: Any
    """The key of the entry. None in a list and a set; an ellipsis for an attribute as a whole."""
    value: Any
    by_name: bool = False
    """True if the entry was found by its name, so that it may be the library's own."""

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
        self._registers = False  # the latest cells may
        self._functions: set[str] = set()
        """The functions that are defined in cells and may register something: a later cell may call them."""
        self._names = RegisteredNames()
        self._found: list[Entry] = []
        self._changed = False  # by the last search
        self._refusals = Refusals()

    def find(self) -> list[Entry]:
        """Return the notebook's entries in registries of libraries that can be sent. Each registry with an entry that
        cannot be sent is named in one warning."""
        new = self._cells.take()
        if new:
            self._names.read(new)
            self._registers = any([self._may_register(cell) for cell in new])
        if self._registers and (new or self._may_register(self._cells.passed(self._changed))):
            self._names.find_packages(main_namespace())
            before, self._found = self._found, list(_search(self._names))
            self._changed = {id(entry.value) for entry in before} != {id(entry.value) for entry in self._found}
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
    if entry.name == _LEAVES:
        return _enter_leaf(entry)
    if entry.key is ...:
        return _replace(entry)
    registry = _registry(entry)
    if isinstance(registry, types.FunctionType):
        registry.register(entry.key, entry.value)  # type: ignore[attr-defined]
        return lambda: None
    if isinstance(registry, set):
        registry.add(entry.value)
        return functools.partial(registry.discard, entry.value)
    if isinstance(registry, list):
        if any(type(one) is str and one == entry.value for one in registry):
            return lambda: None
        registry.append(entry.value)
        return functools.partial(_remove, registry, entry.value)
    before = registry.get(entry.key, _MISSING)
    if entry.by_name and before is not _MISSING:
        return lambda: None
    registry[entry.key] = entry.value
    if before is _MISSING:
        return functools.partial(registry.pop, entry.key, None)
    return functools.partial(registry.__setitem__, entry.key, before)


def _remove(registry: list[Any], value: Any) -> None:
    """Remove an object from a list without a comparison, which may raise."""
    registry[:] = [one for one in registry if one is not value]


def _enter_leaf(entry: Entry) -> Callable[[], object]:
    """Make traces of `torch.fx` call a function of this process's main namespace."""
    leaves, main = _registry(entry), main_namespace()
    main.setdefault(entry.key, entry.value)  # torch looks up all of these names in each trace
    leaves[id(main), entry.key] = main
    return functools.partial(leaves.pop, (id(main), entry.key), None)


def _replace(entry: Entry) -> Callable[[], object]:
    """Set an attribute of an object that keeps a library's options."""
    name, attribute = entry.name.split(".")
    owner = contents(entry.owner)[name]
    before = contents(owner).get(attribute, _MISSING)
    setattr(owner, attribute, entry.value)
    if before is _MISSING:
        return functools.partial(delattr, owner, attribute)
    return functools.partial(setattr, owner, attribute, before)


def _registry(entry: Entry) -> Any:
    """Return the container of an entry, or the function under `singledispatch`. None if there is none any more."""
    found: Any = entry.owner
    for name in entry.name.split("."):
        found = contents(found).get(name)
    return found


def _holds(entry: Entry) -> bool:
    if not entry.name:
        return True
    if entry.name == _LEAVES:
        return main_namespace().get(entry.key) is entry.value
    registry = _registry(entry)
    if entry.key is ...:
        return registry is entry.value
    if type(registry) is types.FunctionType:
        registry = contents(registry).get("registry", {})
    if is_a(registry, (dict, types.MappingProxyType)):
        return registry.get(entry.key) is entry.value
    return is_a(registry, (list, set)) and any(value is entry.value for value in registry)


def _search(names: RegisteredNames) -> Iterator[Entry]:
    main, never = main_namespace(), _NEVER | NO_LIBRARIES
    seen = {id(main)}  # modules import each other's containers; a library may hold the notebook's variables
    owners = [(name, module) for name, module in list(sys.modules.items()) if is_a(module, types.ModuleType)]
    owners.sort(key=lambda one: not names.in_package(one[0].partition(".")[0]))  # before those that import from them
    for name, module in owners:
        package = name.partition(".")[0]
        if package not in never:
            entries = [*_of_owner(module, main, seen, names.in_package(package))]
            if entries and _can_import(package):
                yield from entries
    for cls in classes():
        package = _package(cls)
        if package not in never:
            own = _of_owner(cls, main, seen, names.in_package(package))
            found = [*own, *(_of_abstract(cls, main) if is_a(cls, abc.ABCMeta) else ())]
            if found and importable(cls):  # which takes longer than the rest
                yield from found
    yield from _leaves(main)


def _leaves(main: dict[str, Any]) -> Iterator[Entry]:
    """Yield the functions of cells that `torch.fx.wrap` was called for."""
    fx = sys.modules.get("torch.fx._symbolic_trace")
    for (_, name), namespace in list(contents(fx).get(_LEAVES, {}).items()):
        if fx is not None and namespace is main and name in main:
            yield Entry(fx, _LEAVES, name, main[name])


def _can_import(package: str) -> bool:
    """Return whether a package is found. The folder of one that was imported may be gone, or be on the path no more."""
    finders = [finder for finder in list(sys.meta_path) if hasattr(finder, "find_spec")]
    return any(finder.find_spec(package, None) is not None for finder in finders)


def _of_owner(owner: Any, main: dict[str, Any], seen: set[int], names: set[str]) -> Iterator[Entry]:
    in_module = is_a(owner, types.ModuleType)
    if not in_module and _CONTAINERS.isdisjoint(map(type, contents(owner).values())):
        return  # as in most classes
    for name, found in copied(owner).items():
        kind = type(found)
        if kind in _USUAL or id(found) in seen:
            continue
        if kind in _CONTAINERS:
            seen.add(id(found))  # those with two underscores are `__all__` and Python's own
            yield from _of_container(owner, name, found, main, set() if name.startswith("__") else names)
        elif kind is types.FunctionType:
            if in_module and found.__closure__:  # as each function under `singledispatch` has
                yield from _of_function(owner, name, found, main, seen)
        elif in_module and _dict_offset(kind) and not issubclass(kind, _NO_REGISTRIES) and _package(kind) not in _NEVER:
            seen.add(id(found))
            if not _CONTAINERS.isdisjoint(map(type, contents(found).values())):
                yield from _of_object(owner, name, found, main, names)


def _of_function(owner: Any, name: str, found: Any, main: dict[str, Any], seen: set[int]) -> Iterator[Entry]:
    """Yield the entries of a function under `singledispatch`."""
    registry = contents(found).get("registry")
    if type(registry) is types.MappingProxyType and "register" in contents(found):
        seen.add(id(found))
        for cls, fn in list(registry.items()):
            if _is_of_notebook(cls, main) or _is_of_notebook(fn, main):
                yield Entry(owner, name, cls, fn)


def _of_object(owner: Any, name: str, found: Any, main: dict[str, Any], names: set[str]) -> Iterator[Entry]:
    """Yield the entries in the containers of an object. One that replaces a default of its class is an option of the
    library, and all options of the object go with it."""
    defaults = contents(type(found))
    for inner, value in copied(found).items():
        if type(value) not in _CONTAINERS or value is main:
            continue
        if entries := [*_of_container(owner, f"{name}.{inner}", value, main, names)]:
            if inner not in defaults:
                yield from entries
                continue
            options = [(option, own) for option, own in contents(found).items() if option in defaults]
            yield from (Entry(owner, f"{name}.{option}", ..., own) for option, own in options)
            return


def _of_container(owner: Any, name: str, container: Any, main: dict[str, Any], names: set[str]) -> Iterator[Entry]:
    keys, values = _items(container)
    if not names and _HOLD_NOTHING.issuperset(map(type, values)) and PLAIN.issuperset(map(type, keys)):
        return  # as most containers
    for key, value in zip(keys, values, strict=True):
        if type(key) is int:  # of handles: each process counts its own
            continue
        own = type(value) not in _HOLD_NOTHING and (_is_own(value, main) or (key is not None and _has_own(value, main)))
        if own or (type(key) not in PLAIN and _is_own(key, main)):
            yield Entry(owner, name, key, value)
        elif names and may_be(key, value, names):
            yield Entry(owner, name, key, value, by_name=True)


def _package(cls: type) -> str:
    return text(cls, "__module__").partition(".")[0]


def _of_abstract(cls: Any, main: dict[str, Any]) -> Iterator[Entry]:
    from _abc import _get_dump  # as cloudpickle does it

    for reference in _get_dump(cls)[0] if "_abc_impl" in contents(cls) else ():
        registered = reference()
        if _is_of_notebook(registered, main):
            yield Entry(cls, "", None, registered)


def _items(container: Any) -> tuple[Collection[Any], Collection[Any]]:
    """Return the keys and the values of a container, as copies; None for each key of a list or a set."""
    if is_a(container, dict):
        found = dict(container)
        return found.keys(), found.values()
    values = list(container)
    return [None] * len(values), values


def _is_own(value: Any, main: dict[str, Any]) -> bool:
    """Return whether a value or key belongs to the notebook, or is a tuple that contains something of the notebook."""
    if issubclass(type(value), tuple):
        parts = tuple.__iter__(value)
        return any(_is_of_notebook(part, main) for part in parts if type(part) not in PLAIN)
    return _is_of_notebook(value, main)


def _has_own(value: Any, main: dict[str, Any]) -> bool:
    """Return whether a value is a library's wrapper of something of the notebook: a function inside a function, or an
    object with an attribute such as `entry_point`."""
    kind = type(value)
    if kind is types.FunctionType:
        held = [_inside(cell) for cell in value.__closure__ or ()]
    elif kind is functools.partial:
        held = [value.func, *value.args]
    elif not _dict_offset(kind) or issubclass(kind, (type, types.ModuleType)):
        return False
    else:
        held = list(contents(value).values())
    return any(_is_of_notebook(one, main) for one in held)


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_of_notebook(value: Any, main: dict[str, Any]) -> bool:
    kind = type(value)
    if kind is types.FunctionType:
        return value.__globals__ is main
    return issubclass(kind, type) and contents(value).get("__module__") == "__main__"

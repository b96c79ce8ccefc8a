"""The names that functions and classes use, and the namespaces of these names."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

from ..notebook.shell import shown
from .foreign import attribute, contents, is_a, text
from .need import main_namespace

Namespace = dict[str, Any]

_BY_NAME = frozenset(
    ["LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"]
)  # instructions


def importable(obj: Any) -> bool:
    """Return whether a reader gets the same function or class by importing its module."""
    name = text(obj, "__module__")
    module = sys.modules.get(name) if name != "__main__" else None
    if module is None or travels_by_value(module):
        return False
    found: Any = module
    for part in text(obj, "__qualname__").split("."):
        try:
            found = getattr(found, part, None)
        except Exception:  # a lazy module's, which cannot import what it needs
            return False
    return found is obj


def travels_by_value(module: Any) -> bool:
    """Return whether a module must be sent by value: it cannot be imported, or `cloudpickle.register_pickle_by_value`
    was called for it.

    `cloudpickle.register_pickle_by_value` may also have been called for a package that contains the module.
    """
    if _is_made_by_code(module):
        return True
    registered = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES
    return bool(registered) and cloudpickle.cloudpickle._is_registered_pickle_by_value(module)


def _is_made_by_code(module: Any) -> bool:
    name = text(module, "__name__").partition(".")[0]
    if not name or name in ("__main__", "__mp_main__") or name in sys.builtin_module_names:
        return False
    top = contents(sys.modules.get(name, module))
    return top.get("__spec__") is None and top.get("__file__") is None


def namespace_of(namespace: Namespace) -> tuple[str, bool]:
    """Return a key for a function's globals, and whether the globals must be sent: not if the reader can import the
    module.
    """
    name = namespace.get("__name__", "__main__")
    module = sys.modules.get(name)
    if module is not None and contents(module) is namespace and not travels_by_value(module):
        return name, name == "__main__"
    return f"{name}#{id(namespace)}", True  # such as a script run by IPython's %run, or exec with an own dict


def namespace_key(fn: Callable[..., Any]) -> str:
    """Return the key of the namespace in which `fn`, behind any wrappers, finds its globals."""
    inner: Any = fn
    with contextlib.suppress(Exception):  # `__wrapped__` of an object that answers any attribute, or raises
        inner = inspect.unwrap(fn)
    while is_a(inner, (functools.partial, types.MethodType)):
        inner = inner.func if is_a(inner, functools.partial) else inner.__func__
    namespace = attribute(inner, "__globals__")
    return namespace_of(namespace)[0] if type(namespace) is dict else "__main__"


def globals_of(fn: types.FunctionType) -> Namespace:
    """Return the globals that `fn` uses, by name. Of the values that cells have shown (`Out`), the result includes
    only those that `fn` names by number.
    """
    namespace = fn.__globals__
    names = dict.fromkeys(globals_used(fn.__code__))
    names.update(dict.fromkeys(names_in_hints(fn.__annotations__)))
    found = {name: namespace[name] for name in names if name in namespace}
    if "__subclasses__" in attributes_of(fn.__code__):
        found.update(_subclasses(namespace))
    if "Out" in found and found["Out"] is shown():
        numbers = {number for code in _codes(fn.__code__) for number in code.co_consts if type(number) is int}
        found["Out"] = Outputs({number: found["Out"][number] for number in numbers & set(found["Out"])})
    return found


def _subclasses(namespace: Namespace) -> Iterator[tuple[str, type]]:
    """Yield the classes of a namespace that are derived from others of the same module."""
    for name, value in list(namespace.items()):
        module = text(value, "__module__") if is_a(value, type) else ""
        if module == namespace.get("__name__") and any(text(base, "__module__") == module for base in value.__bases__):
            yield name, value


def globals_of_class(cls: type) -> Namespace:
    """Return the variables of the notebook that occur only in the text of a class's type hints."""
    hints = vars(cls).get("__annotations__")
    if cls.__module__ != "__main__" or not hints:
        return {}
    main = main_namespace()
    return {name: main[name] for name in names_in_hints(hints) if name in main}


@functools.lru_cache(maxsize=4096)
def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that `code`, or a function or class inside it, reads or writes, including names used
    as `__main__.name` or by `from __main__ import name`.
    """
    names: dict[str, None] = {}
    module, last = "", None
    for i in dis.get_instructions(code):
        module = i.argval if i.opname == "IMPORT_NAME" else module
        of_main = i.opname == "IMPORT_FROM" and module == "__main__"
        if i.opname in _BY_NAME or of_main or (i.opname in ("LOAD_ATTR", "LOAD_METHOD") and last == "__main__"):
            names[i.argval] = None
        last = i.argval
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(dict.fromkeys(globals_used(const)))
    return tuple(names)


def names_in_hints(hints: Mapping[str, Any]) -> Iterator[str]:
    """Return the names in type hints that are strings, wholly (`from __future__ import annotations`) or in part."""
    for hint in hints.values() if isinstance(hints, Mapping) else ():
        try:
            found = [name for inner in _texts(hint) for name in _names_in(inner)]
        except Exception:  # it is text for people, or an object that answers nothing
            continue
        yield from found


@functools.lru_cache(maxsize=4096)
def _names_in(text: str) -> tuple[str, ...]:
    return globals_used(compile(text.strip(), "<hint>", "eval"))


def _texts(hint: Any) -> Iterable[str]:
    if isinstance(hint, str):
        return [hint]
    if isinstance(hint, typing.ForwardRef):
        return [hint.__forward_arg__]
    if type(hint) is type:
        return []
    if typing.get_origin(hint) is typing.Literal:
        return []
    return [found for part in getattr(hint, "__args__", None) or () for found in _texts(part)]


def submodules(module: types.ModuleType, code: types.CodeType) -> list[types.ModuleType]:
    """Return the loaded submodules of a package that `code` may use through it, as in `xml.etree.ElementTree`."""
    if "__path__" not in contents(module):
        return []
    found = []
    for name in attributes_of(code):
        inner = sys.modules.get(f"{module.__name__}.{name}")
        if isinstance(inner, types.ModuleType):
            found += [inner, *submodules(inner, code)]
    return found


@functools.lru_cache(maxsize=4096)
def attributes_of(code: types.CodeType) -> frozenset[str]:
    """Return the names that `code`, or a function or class inside it, reads as attributes or globals."""
    return frozenset(name for inner in _codes(code) for name in inner.co_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


class Outputs(dict[int, Any]):
    """The values that cells have shown, in a rank: only the values that functions name by number."""

    def __missing__(self, number: Any) -> Any:
        raise KeyError(
            f"Out[{number!r}] was not sent: a function gets only the outputs that it names by number; "
            f"need={{'value': Out[{number!r}]}} sends any other"
        )

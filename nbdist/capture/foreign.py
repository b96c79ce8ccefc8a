"""Access to objects of other libraries without running their code.

Optional features (patches, settings, hints, the name of an object that cannot be pickled) inspect objects that may
raise at any attribute, comparison or `__class__`. They must never make a call fail.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import text_of

T = TypeVar("T")

#: Types whose instances hold nothing of the notebook's. Most values in classes and containers are of these.
PLAIN: frozenset[type] = frozenset(
    {str, bytes, int, float, bool, type(None), types.BuiltinFunctionType}
    | {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType}
    | {types.GetSetDescriptorType, types.MemberDescriptorType}
)

_NOTHING: types.MappingProxyType[str, Any] = types.MappingProxyType({})
_dict_of_type: Any = type.__dict__["__dict__"]
_said: set[str] = set()


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether the type of `obj` is one of these types or derived from one; `obj.__class__` is not used.

    `isinstance` reads `obj.__class__`, which may raise.
    """
    return issubclass(type(obj), kinds)


def contents(obj: Any) -> dict[str, Any] | types.MappingProxyType[str, Any]:
    """Return `vars(obj)`, read without the object's own `__getattr__` and `__getattribute__`; empty if it has none."""
    if is_a(obj, type):
        found: Any = _dict_of_type.__get__(obj)
    else:
        try:
            found = object.__getattribute__(obj, "__dict__")
        except Exception:  # it has none, or a property of this name that raises
            return _NOTHING
    return found if is_a(found, (dict, types.MappingProxyType)) else _NOTHING


def copied(obj: Any) -> dict[str, Any]:
    """Return a copy of `contents(obj)`, which other threads may change. A loop over its items makes no objects, unlike
    a list of the items: half a million of them would run the garbage collector."""
    return contents(obj).copy()


def text(obj: Any, name: str) -> str:
    """Return an attribute of `obj` if it is a string, such as `__module__`; otherwise an empty string."""
    try:
        found = type.__getattribute__(obj, name) if is_a(obj, type) else object.__getattribute__(obj, name)
    except Exception:
        return ""
    return found if type(found) is str else ""


def name_of(fn: Any) -> str:
    """Return the name of a function; for a callable without a name, the name of its type."""
    found = attribute(fn, "__name__")
    return found if type(found) is str else type(fn).__name__


def attribute(obj: Any, name: str) -> Any:
    """Return `getattr(obj, name)`, or None if it raises any exception."""
    try:
        return getattr(obj, name)
    except Exception:
        return None


def looked(look: Callable[[], T], otherwise: T, what: str) -> T:
    """Return the value of `look`. If `look` raises, return `otherwise`, and warn once for each `what`."""
    try:
        return look()
    except Exception as exc:
        if what not in _said:
            _said.add(what)
            warnings.warn(
                f"{what} cannot be read, so the call runs without it: {type(exc).__name__}: {text_of(exc)}",
                stacklevel=2,
            )
        return otherwise

"""Libraries that a cell has loaded with ctypes: a rank loads them again."""

from __future__ import annotations

import os
import sys
from typing import Any

from .foreign import contents, is_a
from .need import main_namespace

Reduction = tuple[Any, ...]


def reduce_library(obj: Any) -> Reduction | None:
    """Return the reduction of a `ctypes.CDLL`, or of a function of one that is a variable of the notebook. None for any
    other object.

    Functions have the types of arguments and results that cells have set.
    """
    ctypes: Any = sys.modules.get("ctypes")
    if ctypes is None or not is_a(obj, (ctypes.CDLL, ctypes._CFuncPtr)):
        return None
    if is_a(obj, ctypes.CDLL):
        found = {name: _types(fn) for name, fn in list(contents(obj).items()) if is_a(fn, obj._FuncPtr)}
        return load, (type(obj), _path(obj._name)), found, None, None, set_types
    for library in list(main_namespace().values()):
        if is_a(library, ctypes.CDLL) and library._FuncPtr is type(obj) and contents(obj).get("__name__"):
            return function, (library, obj.__name__, _types(obj))
    return None


def load(kind: Any, name: str | None) -> Any:
    """Load a library."""
    return kind(name)


def set_types(library: Any, functions: dict[str, tuple[Any, ...]]) -> None:
    """Set the types of functions of a library."""
    for name, types in functions.items():
        function(library, name, types)


def function(library: Any, name: str, types: tuple[Any, ...]) -> Any:
    """Return a function of a library, with its types."""
    found = getattr(library, name)
    for attribute, value in zip(("argtypes", "restype", "errcheck"), types, strict=True):
        if value is not None or attribute == "restype":
            setattr(found, attribute, value)
    return found


def _types(fn: Any) -> tuple[Any, ...]:
    return fn.argtypes, fn.restype, fn.errcheck


def _path(name: str | None) -> str | None:
    """Return the name by which a rank finds a library: a path as an absolute one, any other name as it is."""
    return os.path.abspath(name) if name and os.sep in name and os.path.exists(name) else name

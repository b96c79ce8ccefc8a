"""Diagnosis of an object that cannot be pickled: its name, the part of it that fails, and the reason."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CaptureError, text_of
from .foreign import attribute, contents, is_a, text
from .names import Outputs, globals_of
from .pickler import Pickler
from .reading import Unreadable


def explain_failure(exc: Exception, parts: Mapping[str, Any]) -> CaptureError | MemoryError:
    """Return a `CaptureError` for a failure to pickle: it names one of `parts`, the path inside it, and the reason.

    A `MemoryError` has nothing to do with the object, and a `CaptureError` already names it: both are returned
    unchanged.
    """
    if isinstance(exc, (MemoryError, CaptureError)):
        return exc
    deep = isinstance(exc, RecursionError)
    where, culprit = next(
        (_culprit(what, part, deep, {}) for what, part in parts.items() if _fails(part, deep, {})),
        (" or ".join(parts), None),
    )
    if deep:
        why = (
            f"it is nested too deeply, such as a long chain of objects that each refer to the next ({text_of(exc)}). "
            f"Pass it as a list, or make it inside the function instead."
        )
    else:
        kind = text(type(culprit), "__qualname__")
        why = (
            f"it is of type {kind} ({type(exc).__name__}: {text_of(exc)}). Make it inside the function instead, or "
            f"pass what it is made from."
        )
    return CaptureError(f"{where} cannot be sent between the notebook and the ranks: {why}")


def explain_unreadable(exc: Unreadable, where: str) -> CaptureError:
    """Return a `CaptureError` for a failure to read the pickle; `where` is the reader."""
    (name,), cause = exc.args, exc.__cause__ or exc
    if isinstance(cause, (ImportError, SyntaxError)):
        why = (
            "it needs a module that cannot be imported there. The module's file may be gone, or edited after the "
            "notebook has imported it; a package must be installed there."
        )
    else:
        why = (
            "it depends on something that exists only where it was made. Make it where it is used, or pass the values "
            "that it is made from."
        )
    return CaptureError(f"{name} cannot be read in {where} ({type(cause).__name__}: {text_of(cause)}): {why}")


def culprit_of(what: str, value: Any, instead: Mapping[int, Any]) -> tuple[str, Any]:
    """Return the innermost part of `value`, which has the name `what`, that cannot be pickled, and its name; `instead`
    are replacements for parts, by id."""
    return _culprit(what, value, False, instead)


def _fails(obj: Any, deep: bool, instead: Mapping[int, Any]) -> bool:
    """Return whether `obj` cannot be pickled, with replacements for other objects, by id."""
    try:
        Pickler(io.BytesIO(), instead=instead).dump(obj)
    except RecursionError:
        return deep
    except Exception:
        return not deep
    return False


def _culprit(path: str, obj: Any, deep: bool, instead: Mapping[int, Any]) -> tuple[str, Any]:
    """Return the innermost part of `obj` that cannot be pickled by itself, and the path to it.

    For an object that is nested too deeply, the path leads to a variable: all parts of it are too deep as well.
    """
    instead = {**instead, id(obj): None}  # what leads to a part is not to blame
    parts = _parts(obj) if is_a(obj, _CALLABLES) or not (deep or _refuses(obj)) else []
    for step, child in parts:
        if id(child) not in instead and _fails(child, deep, instead):
            return _culprit(path + step if step[0] in "[.(" else step, child, deep, instead)
    return path, obj


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _refuses(obj: Any) -> bool:
    """Return whether `obj` raises an exception that has nothing to do with its parts, such as a queue that may only be
    inherited."""
    if _is_polars(obj) or not _fails(obj, False, {id(child): None for _, child in _parts(obj)}):
        return False  # polars makes a column, an object with another id, whenever it is asked for it
    try:
        obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return True
    return False


def _is_polars(obj: Any) -> bool:
    polars = sys.modules.get("polars")
    return polars is not None and (is_a(obj, polars.DataFrame) or is_a(obj, polars.Series))


def _parts(obj: Any) -> list[tuple[str, Any]]:
    """Return the objects that pickling `obj` reaches next, if they can be read.

    Each part comes with the source text that leads to it, or with a name of its own.
    """
    found: list[tuple[str, Any]] = []
    for look in (_items, _attributes):
        with contextlib.suppress(Exception):  # of an object that answers what it is asked with an exception
            found.extend(look(obj))
    return found


def _items(obj: Any) -> Iterable[tuple[str, Any]]:
    polars = sys.modules.get("polars")
    if is_a(obj, types.FunctionType):
        closure = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in closure)
        yield from globals_of(obj).items()
        yield from ((f"(default {i})", value) for i, value in enumerate(obj.__defaults__ or ()))
    elif polars is not None and is_a(obj, polars.DataFrame):
        yield from ((f"[{name!r}]", obj[name]) for name, dtype in obj.schema.items() if dtype == polars.Object)
    elif polars is not None and is_a(obj, polars.Series):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj if obj.dtype == polars.Object else ()))
    elif is_a(obj, types.MethodType):
        yield from ((".__func__", obj.__func__), (".__self__", obj.__self__))
    elif is_a(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif is_a(obj, Outputs):
        yield from ((f"Out[{key!r}]", value) for key, value in obj.items())
    elif is_a(obj, Mapping):
        yield from ((f"[{_text(key)}]", value) for key, value in list(obj.items()))
    elif is_a(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))


def _attributes(obj: Any) -> Iterable[tuple[str, Any]]:
    yield from ((f".{name}", value) for name, value in list(contents(obj).items()))
    if not is_a(obj, type):
        yield ".__class__", type(obj)
        for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            if (value := attribute(obj, name)) is not None:
                yield f".{name}", value


def _text(key: Any) -> str:
    try:
        return repr(key)
    except Exception:
        return f"<{type(key).__name__}>"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None

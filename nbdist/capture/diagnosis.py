"""What cannot be pickled: which name it was, where inside it, and why."""

from __future__ import annotations

import copyreg
import functools
import io
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CaptureError, text_of
from .names import Outputs, globals_of
from .pickler import Pickler
from .reading import Unreadable


def explain_failure(exc: Exception, parts: Mapping[str, Any]) -> CaptureError | MemoryError:
    """A `CaptureError` for a failure to pickle: which of `parts` it was, where inside it, and why.

    A lack of memory is no matter of what is pickled: it is the exception itself.
    """
    if isinstance(exc, MemoryError):
        return exc
    deep = isinstance(exc, RecursionError)
    where, culprit = next(
        (_culprit(what, part, deep) for what, part in parts.items() if _fails(part, deep)), (" or ".join(parts), None)
    )
    if deep:
        why = (
            f"it is nested too deeply, such as a long chain of objects that each refer to the next ({text_of(exc)}). "
            f"Pass it as a list, or make it inside the function instead."
        )
    else:
        why = (
            f"it is of type {type(culprit).__qualname__} ({type(exc).__name__}: {text_of(exc)}). Make it inside the "
            f"function instead, or pass what it is made from."
        )
    return CaptureError(f"{where} cannot be sent between the notebook and the ranks: {why}")


def explain_unreadable(exc: Unreadable, where: str) -> CaptureError:
    """A `CaptureError` for a failure to read `where` what was sent."""
    (name,), cause = exc.args, exc.__cause__ or exc
    return CaptureError(
        f"{name} cannot be read in {where} ({type(cause).__name__}: {text_of(cause)}): it needs what is only where it "
        f"was made. Make it where it is used instead, or pass what it is made from."
    )


def _fails(obj: Any, deep: bool) -> bool:
    try:
        Pickler(io.BytesIO()).dump(obj)
    except RecursionError:
        return deep
    except Exception:
        return not deep
    return False


def _culprit(path: str, obj: Any, deep: bool, seen: frozenset[int] = frozenset()) -> tuple[str, Any]:
    """The innermost part of `obj` that cannot be pickled by itself, and the path to it.

    Of what is too deep, the path is that to a variable: all that is in it is too deep as well.
    """
    seen |= {id(obj)}
    for step, child in _parts(obj) if not deep or isinstance(obj, _CALLABLES) else ():
        if id(child) not in seen and _fails(child, deep):
            return _culprit(path + step if step[0] in "[.(" else step, child, deep, seen)
    return path, obj


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _parts(obj: Any) -> Iterable[tuple[str, Any]]:
    """What pickling `obj` reaches next: each with the source text that leads to it, or with a name of its own."""
    polars = sys.modules.get("polars")
    if isinstance(obj, types.FunctionType):
        closure = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in closure)
        yield from globals_of(obj).items()
        yield from ((f"(default {i})", value) for i, value in enumerate(obj.__defaults__ or ()))
    elif polars is not None and isinstance(obj, polars.DataFrame):
        yield from ((f"[{name!r}]", obj[name]) for name, dtype in obj.schema.items() if dtype == polars.Object)
    elif polars is not None and isinstance(obj, polars.Series):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj if obj.dtype == polars.Object else ()))
    elif isinstance(obj, types.MethodType):
        yield from ((".__func__", obj.__func__), (".__self__", obj.__self__))
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, Outputs):
        yield from ((f"Out[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in list(obj.items()))
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    if isinstance(obj, type) or hasattr(obj, "__dict__"):
        yield from ((f".{name}", value) for name, value in list(vars(obj).items()))
    if not isinstance(obj, type):
        yield ".__class__", type(obj)
        for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            if hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None

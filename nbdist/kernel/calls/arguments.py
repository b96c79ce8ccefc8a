"""What `in_ddp` and `Session` are given, checked before any process starts."""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
import types
from collections.abc import Callable
from typing import Any

from ...capture.foreign import is_a, name_of
from ...capture.imports import parse_imports
from ...capture.need import resolve_need

_OUTPUTS = ("rank0", "all", "tabs", "none")


def check_platform() -> None:
    """Raise `NotImplementedError` where ranks cannot be forked."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "nbdist forks its ranks, which Windows cannot do. It runs on Linux, under WSL 2, and on macOS (CPU ranks)."
        )


def check_count(value: Any, *, least: int, name: str) -> None:
    """Raise `TypeError` or `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name}={value}: at least {least}")


def check_min_ranks(min_ranks: Any, nranks: int, restarts: int) -> None:
    """Raise `TypeError` or `ValueError` for what `min_ranks=` does not take."""
    if min_ranks is None:
        return
    check_count(min_ranks, least=1, name="min_ranks")
    if min_ranks > nranks:
        raise ValueError(f"min_ranks={min_ranks}: at most the {nranks} ranks that are asked for")
    if not restarts:
        raise ValueError(f"min_ranks={min_ranks} is about restarts, of which there are none: say restarts=, too")


def check_call(fn: Any, imports: Any, need: Any) -> tuple[str, dict[str, Any]]:
    """The import block as one string, and the needed names with their values; raises for what makes no sense."""
    if not callable(fn):
        raise TypeError(f"the function to run is not callable: {reprlib.repr(fn)}")
    _check_returns(fn)
    block = parse_imports(imports)
    return block, resolve_need(need, fn)


def _check_returns(fn: Any) -> None:
    """Raise `TypeError` for a function whose call returns at once, with something that belongs to the rank."""
    while is_a(fn, functools.partial):
        fn = fn.func
    name = name_of(fn)
    for code in [fn] if is_a(fn, types.FunctionType) else [fn, type(fn).__call__]:
        if _says(inspect.iscoroutinefunction, code):
            raise TypeError(
                f"{name} is a coroutine function: calling it runs nothing, and a coroutine cannot leave its rank. Give "
                f"a function that runs it to its end: lambda: asyncio.run({name}(...))"
            )
        if _says(inspect.isgeneratorfunction, code) or _says(inspect.isasyncgenfunction, code):
            raise TypeError(
                f"{name} is a generator function, for it has a yield: calling it runs nothing, and a generator cannot "
                f"leave its rank. Give a function that goes through it, such as lambda: list({name}(...))"
            )


def _says(asks: Callable[[Any], bool], code: Any) -> bool:
    try:
        return asks(code)
    except Exception:  # an object that answers any attribute with an exception
        return False


def check_output(output: Any) -> str:
    """Raise `ValueError` for what `output=` does not take."""
    if output not in _OUTPUTS:
        raise ValueError(f"output={output!r}: one of {', '.join(map(repr, _OUTPUTS))}")
    return str(output)


def check_start(start: Any) -> str:
    """Raise `ValueError` for what `start=` does not take."""
    if start not in ("forkserver", "spawn"):
        raise ValueError(f"start={start!r}: 'forkserver', or 'spawn' for a fresh interpreter for each rank")
    return str(start)

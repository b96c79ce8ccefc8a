"""Checks of arguments, and the texts of their errors: "`x` must be ..., got ..."."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any


def check_count(value: Any, *, least: int, name: str) -> int:
    """Return `value` if it is an integer of at least `least`; otherwise raise `TypeError` or `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_number(value: Any, *, above: float | None = None, least: float = 0, name: str, unit: str = "") -> None:
    """Raise `TypeError` or `ValueError` unless `value` is finite and within its bound: above `above` if that is
    given, otherwise at least `least`.
    """
    what = f"a number{f' of {unit}' if unit else ''}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {what}, got {shown(value)}")
    if not math.isfinite(value) or (value <= above if above is not None else value < least):
        bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
        raise ValueError(f"{name} must be a finite {what.removeprefix('a ')} {bound}, got {value!r}")


def check_flag(value: Any, *, name: str) -> None:
    """Raise `TypeError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_choice(value: Any, choices: Iterable[str], *, name: str) -> str:
    """Return `value` if it is one of `choices`, and raise `ValueError` otherwise."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {listed}, got {value!r}{nearest(value, known)}")
    return value


def check_path(value: Any, *, name: str, usage: str) -> None:
    """Raise `TypeError` unless `value` is a path. `usage` is a correct call, for the error."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {shown(value)}: write {usage}")


def check_function(fn: Any) -> None:
    """Raise `TypeError` unless `fn` can be called."""
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, got {shown(fn)}: pass the function itself, and its arguments after it "
            f"(in_ddp(2, train, 0.1) and not in_ddp(2, train(0.1)))"
        )


def check_mapping(value: Any, *, name: str, of: str) -> None:
    """Raise `TypeError` unless `value` is a mapping with strings as keys. `of` describes keys and values for the
    error."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping from {of}, such as a dict, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must be a mapping from {of}, got the key {shown(key)}")


def nearest(name: Any, known: Iterable[str]) -> str:
    """Return a sentence that suggests the known name most similar to `name`; an empty string without a similar name."""
    import difflib  # takes some milliseconds, which only errors need

    names = {one.lower(): one for one in known}
    found = difflib.get_close_matches(str(name).lower(), names, n=1) if isinstance(name, str) else []
    return f". Did you mean {names[found[0]]!r}?" if found else ""


def explain_arguments(fn: Callable[..., Any], given: Collection[str], name: str) -> str:
    """Return the text of the error for a call of `fn` with arguments that it does not take.

    Args:
        fn: The called function.
        given: The names of the keyword arguments.
        name: The name of the function for users.
    """
    parameters = [p for p in inspect.signature(fn).parameters.values() if p.name != "self"]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [one for one in given if one not in by_name]
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        listed = ", ".join(stars.get(p.kind, "") + p.name for p in parameters)
        return f"{name} has no argument {unknown[0]!r}{nearest(unknown[0], by_name) or f': it has {listed}'}"
    optional = {p.name: "=" if p.kind is p.KEYWORD_ONLY or p.default is not p.empty else "" for p in parameters}
    return f"write {name}({', '.join(stars.get(p.kind, '') + p.name + optional[p.name] for p in parameters)})"


def shown(value: Any) -> str:
    """Return `value` and its type for an error, cut to some 80 characters."""
    try:
        text = repr(value)
    except Exception:  # an object of somebody else's
        text = "an object"
    return f"{text if len(text) < 80 else text[:77] + '...'} ({type(value).__name__})"

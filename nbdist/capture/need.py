"""`need=`: names of the notebook that a call takes along though its function is not seen to use them."""

from __future__ import annotations

import difflib
import keyword
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .foreign import attribute

#: What `need=` takes.
Names = str | Iterable[str] | Mapping[str, Any]


def main_namespace() -> dict[str, Any]:
    """The notebook's (or script's) own variables."""
    return sys.modules["__main__"].__dict__


def resolve_need(need: Any, fn: Callable[..., Any]) -> dict[str, Any]:
    """The names in `need` with their values. Raises `NameError`, naming the nearest existing names."""
    if isinstance(need, Mapping):
        for name in need:
            _check_name(name)
        return dict(need)
    if not isinstance(need, Iterable):
        raise TypeError(f"need= takes a string of names, a list, or a mapping name → value, not {need!r}")
    if isinstance(need, str):
        need = [name for name in re.split(r"[\s,]+", need) if name]
    namespaces = [main_namespace(), attribute(fn, "__globals__") or {}]
    found = {}
    for name in need:
        _check_name(name)
        for namespace in namespaces:
            if name in namespace:
                found[name] = namespace[name]
                break
        else:
            near = difflib.get_close_matches(name, [n for n in {**namespaces[1], **namespaces[0]} if n[0] != "_"])
            hint = f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise NameError(f"need= names {name!r}, but the notebook has no such variable{hint}", name=name)
    return found


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"need= takes names, not {type(name).__name__}: a string, a list, or a mapping name → value")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"need= takes names of variables, and {name!r} is not one")

"""`need=`: names of the notebook that are sent even if the function does not seem to use them."""

from __future__ import annotations

import contextlib
import keyword
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..checks import nearest, shown
from .foreign import attribute
from .imports import run_imports

#: What `need=` takes.
Names = str | Iterable[str] | Mapping[str, Any]
_NAMES = "need must be names of variables (a string or a list), or a mapping name → value"


def main_namespace() -> dict[str, Any]:
    """Return the variables of the notebook, or of the script."""
    return sys.modules["__main__"].__dict__


def resolve_need(need: Any, fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the names in `need` with their values. Raises `NameError` with the most similar existing names."""
    if isinstance(need, Mapping):
        for name in need:
            _check_name(name)
        return dict(need)
    if not isinstance(need, Iterable):
        raise TypeError(f"{_NAMES}, got {shown(need)}")
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
            near = nearest(name, [known for known in {**namespaces[1], **namespaces[0]} if known[0] != "_"])
            raise NameError(f"need must name variables of the notebook, got {name!r}{near}", name=name)
    return found


@contextlib.contextmanager
def given_names(block: str, names: Mapping[str, Any]) -> Iterator[None]:
    """In the notebook itself, put the names of the import block and these names into `__main__`. Afterwards, restore
    the notebook's own values.

    A value that the block assigns to one of these names stays.
    """
    main = main_namespace()
    given: dict[str, Any] = {}
    run_imports(block, given)
    given.update(names)
    before = {name: main[name] for name in given if name in main}
    main.update(given)
    try:
        yield
    finally:
        for name, value in given.items():
            if name in main and main[name] is value:
                if name in before:
                    main[name] = before[name]
                else:
                    del main[name]


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{_NAMES}, got the name {shown(name)}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{_NAMES}, got {name!r}")

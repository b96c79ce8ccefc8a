"""`need=`: names of the notebook that are sent even if the function does not seem to use them."""

from __future__ import annotations

import contextlib
import keyword
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..checks import nearest, shown
from ..notebook.shell import shell
from .foreign import attribute
from .imports import run_imports

#: What `need=` takes.
Names = str | Iterable[str] | Mapping[str, Any]
_NAMES = "need must be names of variables (a string or a list), or a mapping name → value"


def main_namespace() -> dict[str, Any]:
    """Return the variables of the notebook, or of the script."""
    return sys.modules["__main__"].__dict__


def script() -> str:
    """Return the text of the script that this process runs; empty if it runs none."""
    file = main_namespace().get("__file__")
    try:
        with open(file or "", encoding="utf-8") as source:
            return source.read()
    except (OSError, UnicodeDecodeError):
        return ""


class NewCells:
    """Reader of new code: the cells that were run since its last use, or at the first use the text of a script."""

    def __init__(self) -> None:
        self._read = 0  # how many cells

    def take(self) -> Sequence[str]:
        """Return the new texts."""
        cells = getattr(shell(), "user_ns", {}).get("_ih")
        if cells is None:
            cells = [] if self._read else [script()]
        new, self._read = cells[min(self._read, len(cells)) :], max(self._read, len(cells))
        return new


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

"""The process that ranks work for, and the parts of its state that the ranks adopt."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..notebook.shell import kernel_shell
from ..system.search_path import search_path, shadowed, working_folder


class Origin(NamedTuple):
    """The state of the process that ranks work for: of a notebook's kernel, or of a script."""

    environ: Mapping[str, str]
    changed: frozenset[str]
    """The variables that the process has set since its start. Its other variables belong to its machine."""
    cwd: str
    path: Sequence[str]
    argv: Sequence[str]
    standard: Sequence[str]
    """The modules of Python's standard library that the process has loaded, although ranks would find other modules of
    these names on `path` first."""
    notebook: bool


def here() -> Origin:
    """Return the state of this process."""
    path, notebook = tuple(search_path()), kernel_shell() is not None
    return Origin(*_environ(), working_folder(), path, tuple(sys.argv), shadowed(path), notebook)


def _environ() -> tuple[Mapping[str, str], frozenset[str]]:
    """Return the environment and the variables that were set. They are decoded again only after a change, because each
    call of a named session asks for them."""
    global _decoded
    raw = vars(os.environ)["_data"]
    if raw != _decoded[0]:
        environ, began = dict(os.environ), _environ_at_start()
        changed = frozenset(name for name, value in environ.items() if began.get(name) != value)
        _decoded = dict(raw), (environ, changed)
    return _decoded[1]


_decoded: tuple[Mapping[Any, Any] | None, tuple[Mapping[str, str], frozenset[str]]] = None, ({}, frozenset())


@functools.cache
def _environ_at_start() -> Mapping[str, str]:
    import psutil

    return psutil.Process().environ()

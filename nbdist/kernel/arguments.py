"""What `in_ddp` and `Session` are given, checked before any process starts."""

from __future__ import annotations

import sys
from typing import Any

from ..capture.imports import parse_imports
from ..capture.need import resolve_need

_OUTPUTS = ("rank0", "all", "none")


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


def check_call(fn: Any, imports: Any, need: Any) -> tuple[str, dict[str, Any]]:
    """The import block as one string, and the needed names with their values; raises for what makes no sense."""
    if not callable(fn):
        raise TypeError(f"the function to run is not callable: {fn!r}")
    block = parse_imports(imports)
    return block, resolve_need(need, fn)


def check_output(output: Any) -> str:
    """Raise `ValueError` for what `output=` does not take."""
    if output not in _OUTPUTS:
        raise ValueError(f"output={output!r}: one of {', '.join(map(repr, _OUTPUTS))}")
    return str(output)

"""The options of a session, which `Session`, `in_ddp.options` and `%ddp start` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import Any

from ..engines.contract import EngineOptions
from .calls.arguments import check_count, check_min_ranks, check_output, check_start
from .cell.excerpt import LINES


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionOptions:
    """The options of a session and their defaults; the docstring of `Session` says what each does.

    Raises:
        TypeError, ValueError: For values that make no sense.
    """

    backend: str | Mapping[str, Any] | None = None
    devices: str | Sequence[str] | None = None
    threads: int | str | None = None
    timeout: float | None = None
    output: str = "rank0"
    lines: int | None = LINES
    env: Mapping[str, str] | None = None
    seed: int | None = None
    seed_ranks: bool = False
    settings: bool = True
    engine: str | EngineOptions | None = None
    start: str = "forkserver"
    hold_on_error: bool = False
    restarts: int = 0
    min_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.threads not in (None, "bind"):
            check_count(self.threads, least=1, name="threads")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r}: a number of seconds above 0, or None")
        check_output(self.output)
        if self.lines is not None:
            check_count(self.lines, least=0, name="lines")
        for name, value in (self.env or {}).items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise TypeError(f"env must map names to strings, got {name!r}: {value!r}")
        if not isinstance(self.seed, (Integral, NoneType)):
            raise TypeError(f"seed must be a whole number or None, got {self.seed!r}")
        check_start(self.start)
        check_count(self.restarts, least=0, name="restarts")

    def check_for(self, nranks: int) -> None:
        """Raise `TypeError` or `ValueError` where a session of `nranks` ranks cannot have these options."""
        check_min_ranks(self.min_ranks, nranks, self.restarts)

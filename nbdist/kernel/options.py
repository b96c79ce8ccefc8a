"""The options of a session, shared by `Session`, `in_ddp.options` and `%ddp start`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checks import check_choice, check_count, check_flag, check_number
from ..devices import choose_backend, hidden_gpus, visible_entries
from ..engines.contract import Engine, EngineOptions
from ..system.cores import usable_cores
from ..wire.session_folder import check_name
from .calls.arguments import OUTPUTS, check_backend, check_env, check_min_ranks, check_seed, checks_named, many_ranks
from .calls.group import Layout
from .cell.excerpt import LINES

#: Seconds without a call after which the keeper of a named session ends.
IDLE = 86400.0
#: Bytes that its journal may take, and how few they may be.
KEEP, LEAST_KEPT = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionOptions:
    """The options of a session and their defaults; they are described in the docstring of `Session`.

    Raises:
        TypeError, ValueError: An option is invalid.
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
    on_hang: str = "say"
    check: str | Sequence[str] | None = None
    restarts: int = 0
    min_ranks: int | None = None
    name: str | None = None
    idle: float = IDLE
    keep: int = KEEP

    def __post_init__(self) -> None:
        if self.threads not in (None, "bind"):
            check_count(self.threads, least=1, name="threads")
        if self.timeout is not None:
            check_number(self.timeout, above=0, name="timeout", unit="seconds")
        check_choice(self.output, OUTPUTS, name="output")
        if self.lines is not None:
            check_count(self.lines, least=0, name="lines")
        check_env(self.env)
        if self.seed is not None:
            check_seed(self.seed)
        for name in ("seed_ranks", "settings", "hold_on_error"):
            check_flag(getattr(self, name), name=name)
        check_choice(self.on_hang, ("say", "raise"), name="on_hang")
        checks_named(self.check)
        check_choice(self.start, ("forkserver", "spawn"), name="start")
        check_count(self.restarts, least=0, name="restarts")
        if self.backend is not None:
            check_backend(self.backend)
        if self.name is not None:
            check_name(self.name)
        check_number(self.idle, above=0, name="idle", unit="seconds")
        check_count(self.keep, least=LEAST_KEPT, name="keep")
        for option, default in (("idle", IDLE), ("keep", KEEP)):
            if self.name is None and getattr(self, option) != default:
                raise ValueError(
                    f"{option} must be given with a name, got no name: Session(2, name='...', {option}=...)"
                )

    def check_for(self, nranks: int) -> None:
        """Raise `TypeError` or `ValueError` if a session of `nranks` ranks cannot have these options."""
        check_min_ranks(self.min_ranks, nranks, self.restarts)

    def layout(self, nranks: int, engine: Engine) -> Layout:
        """Return the devices and options with which `nranks` ranks are started. Raises the exceptions of `Session`."""
        env, group = dict(self.env or {}), {"backend": self.backend} if isinstance(self.backend, str) else self.backend
        group = dict(group or {})
        devices = engine.devices(nranks, self.devices)
        environ = {**os.environ, **env}
        visible = visible_entries(environ) if devices[0] not in ("cpu", "cuda") else None
        backend, notice = choose_backend(devices, group.pop("backend", None), visible)
        if engine.local and devices[0] == "cpu":
            hidden = hidden_gpus(environ) if self.devices is None else ""
            notice = notice or hidden or many_ranks(nranks, len(usable_cores()))
        return Layout(devices, backend, group, self.threads, env, self.seed, self.seed_ranks, visible, notice)

    def for_executor(self) -> dict[str, Any]:
        """Return the options of an `Executor`, by its names for them."""
        return {
            "timeout": self.timeout,
            "keep_frames": self.hold_on_error,
            "on_hang": self.on_hang,
            "check": checks_named(self.check),
            "restarts": self.restarts,
            "min_ranks": self.min_ranks,
        }

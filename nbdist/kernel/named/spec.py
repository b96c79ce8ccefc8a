"""Messages to a keeper: what a session is, and what is to be done with its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...engines.contract import EngineOptions
from ...engines.origin import Origin
from ...wire.messages import Header
from ..calls.group import Layout


class Spec(NamedTuple):
    """The options of a session, for the keeper that starts its ranks."""

    layout: Layout
    env: Mapping[str, str]
    start: str
    keep: int
    idle: float
    engine: str | EngineOptions
    opened_by: Mapping[str, str]
    """The variables that `Engine.lend` has returned."""
    origin: Origin | None
    """The state of the process that makes the session; None where it is not known."""
    executor: Mapping[str, Any]
    """Further arguments of `Executor`."""
    options: Mapping[str, Any]
    """Arguments of `Session`, for those who attach."""


class Action(NamedTuple):
    """An action of a keeper's ranks: a call, or another one that takes turns with calls."""

    kind: str
    """call, debug, widget, empty_cache, or restart."""
    what: str
    """The name of the function, or of the action."""
    asks: bool
    """True if the client can have a line typed."""
    output: str = "rank0"
    lines: int | None = None
    values: Sequence[Any] = ()
    """Arguments of an action that is no call; of a call there are:"""
    header: Header | None = None
    seeds: tuple[int, int, int] | None = None
    targets: Sequence[int] | None = None
    everyone: bool = False
    once: bool = False
    originals: Sequence[tuple[str, str]] = ()
    """Module and qualified name of each object that was sent by number."""

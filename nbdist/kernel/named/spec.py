"""Messages to a keeper: the description of a session, and the actions of its ranks."""

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
    """The variables that were returned by `Engine.lend`."""
    origin: Origin | None
    """The state of the process that makes the session; None if it is not known."""
    executor: Mapping[str, Any]
    """Further arguments of `Executor`."""
    options: Mapping[str, Any]
    """The arguments of `Session`, for processes that attach."""


class Action(NamedTuple):
    """An action of a keeper's ranks: a call, or another action that is done in turn with calls."""

    kind: str
    """"call", "debug", "widget", "empty_cache", or "restart"."""
    what: str
    """The name of the function, or of the action."""
    asks: bool
    """True if the client can ask its user for a line."""
    output: str = "rank0"
    lines: int | None = None
    values: Sequence[Any] = ()
    """The arguments of an action. For a call, they are replaced by the following fields:"""
    header: Header | None = None
    seeds: tuple[int, int, int] | None = None
    targets: Sequence[int] | None = None
    everyone: bool = False
    once: bool = False
    originals: Sequence[tuple[str, str]] = ()
    """The module and the qualified name of each object that was sent by number."""

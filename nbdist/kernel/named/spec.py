"""Messages to a keeper: what a session is, and what is to be done with its ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...system.search_path import search_path, shadowed, working_folder
from ...wire.messages import Header, Setting
from ..calls.group import Layout


class Spec(NamedTuple):
    """The options of a session, for the keeper that starts its ranks."""

    layout: Layout
    env: Mapping[str, str]
    start: str
    keep: int
    idle: float
    notebook: bool
    """True if the ranks work for a notebook."""
    setting: Setting
    executor: Mapping[str, Any]
    """Further arguments of `Executor`."""
    options: Mapping[str, Any]
    """Arguments of `Session`, for those who attach."""


class Act(NamedTuple):
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


def own_setting() -> Setting:
    """Return the state of this process that fresh ranks take over."""
    path = tuple(search_path())
    return Setting(dict(os.environ), working_folder(), path, tuple(sys.argv), standard=shadowed(path))

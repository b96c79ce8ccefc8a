"""Messages between a keeper and its clients: the description of a session, the actions of its ranks, and answers."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...engines.contract import EngineOptions
from ...engines.origin import Origin
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
    header: bytes = b""
    """The pickle of a `Header`."""
    cells: Mapping[str, int] = {}
    seeds: tuple[int, int, int] | None = None
    targets: Sequence[int] | None = None
    everyone: bool = False
    once: bool = False
    originals: Sequence[tuple[str, str]] = ()
    """The module and the qualified name of each object that was sent by number."""


class Answer(NamedTuple):
    """The values of a short call, which its client gets before they are in the journal."""

    token: str
    values: Sequence[tuple[int, bytes]]
    """For each rank that answers, its number and the pickle of its value."""


#: The bytes of a wakeup without an answer, and the head of an answer: a mark and the size.
WAKEUP = b"."
_HEAD = struct.Struct("<cI")


def encode_answer(answer: Answer) -> bytes:
    """Return the bytes of an answer for the connection on which its client waits."""
    body = pickle.dumps(tuple(answer), protocol=5)
    return _HEAD.pack(b"!", len(body)) + body


def decode_answers(data: bytes) -> tuple[list[Answer], bytes]:
    """Return the answers in what a client has received, and the rest: the first part of the next answer."""
    found = []
    while len(data := data.lstrip(WAKEUP)) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(data)[1]
        if len(data) < end:
            break
        found.append(Answer(*pickle.loads(data[_HEAD.size : end])))
        data = data[end:]
    return found, data

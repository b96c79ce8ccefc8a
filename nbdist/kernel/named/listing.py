"""The table of all named sessions of this user: `nbdist.sessions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...capture.explain import html_table, size
from ...errors import NbdistError, entry
from ...wire.journal import Record, decode, numbers, path
from ...wire.session_folder import SessionFolder, names
from ..status import duration
from .connection import Connection

_HEAD = ("name", "age", "ranks", "state", "runs", "memory", "last line of output")
_LONGEST_LINE = 60


class SessionInfo(NamedTuple):
    """A named session, as a row of the table."""

    name: str
    age: float
    """The age of the session in seconds; 0 if it is not known."""
    ranks: int
    state: str
    """"idle", "running", "not started", or the reason why the ranks have ended."""
    runs: str
    """The name of the running function."""
    memory: int
    """The private memory of the ranks, in bytes."""
    line: str
    """The last line of output of rank 0."""


class SessionTable(list[SessionInfo]):
    """A list of the named sessions that is displayed as a table."""

    def _rows(self) -> list[Sequence[str]]:
        return [
            (
                one.name,
                duration(one.age),
                str(one.ranks),
                one.state,
                one.runs,
                size(one.memory) if one.memory else "",
                one.line[:_LONGEST_LINE],
            )
            for one in self
        ]

    def __repr__(self) -> str:
        if not self:
            return "no named sessions"
        rows = [_HEAD, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows()) if self else "<p>no named sessions</p>"


@entry
def sessions() -> SessionTable:
    """Return this user's sessions that were made with `name=` and have not been closed: a list that is displayed as a
    table.

    A session has a name, an age in seconds, a number of ranks, a state, the running function, the ranks' memory in
    bytes, and the last line of output. `nbdist.attach` takes the name.

    Raises:
        PermissionError: Other users can access the folder of the sessions.

    Examples:
        >>> sessions()
        no named sessions
    """
    return SessionTable(_describe(SessionFolder(name)) for name in names())


def _describe(folder: SessionFolder) -> SessionInfo:
    about = folder.about()
    known: dict[str, Any] = {"what": "", "memory": 0, "line": ""}
    if host := folder.elsewhere():
        state = f"on {host}"
    elif other := folder.other_version():
        state = f"made with {other}"
    elif folder.alive():
        try:
            known = Connection(folder).ask("about")
            state, busy = known["state"]
            state = ("running" if busy else "idle") if state == "running" else "starting" if busy else state
        except (NbdistError, PermissionError) as exc:
            state = f"does not answer: {exc}".partition("\n")[0]
    else:
        state = _why_over(folder)
    age = max(0.0, time.time() - about["since"]) if "since" in about else 0.0
    return SessionInfo(folder.name, age, about.get("nranks", 0), state, known["what"], known["memory"], known["line"])


def _why_over(folder: SessionFolder) -> str:
    """Return the reason why the ranks of a session have ended."""
    last: Record | None = None
    for number in numbers(folder.path)[-1:]:
        with open(path(folder.path, number), "rb") as file:
            data, position = file.read(), 0
        while (found := decode(data, position)) is not None:
            last, position = found
    if last is not None and last.kind == "over":
        return f"ended: {last.head['why']}"
    return "ended with its machine, which was restarted" if folder.restarted() else "ended: its keeper was killed"

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
    """A named session, as the table of all shows it."""

    name: str
    age: float
    """Seconds since it was made; 0 where that is not known."""
    ranks: int
    state: str
    """idle, running, not started, or why there are no ranks any more."""
    runs: str
    """The name of the function that runs."""
    memory: int
    """Bytes that the ranks have for themselves."""
    line: str
    """The last line of output of rank 0."""


class SessionTable(list[SessionInfo]):
    """The named sessions, as a list that shows itself as a table."""

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
    """Return the sessions of this user that were made with `name=` and not closed, as a list that is shown as a table.

    Each has a name, its age in seconds, the number of ranks, a state, the function that runs, the ranks' memory in
    bytes, and the last line of output. `nbdist.attach` takes the name.

    Raises:
        PermissionError: Other users can get into the folder of the sessions.

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
    """Return why a session has no ranks any more."""
    last: Record | None = None
    for number in numbers(folder.path)[-1:]:
        with open(path(folder.path, number), "rb") as file:
            data, position = file.read(), 0
        while (found := decode(data, position)) is not None:
            last, position = found
    if last is not None and last.kind == "over":
        return f"ended: {last.head['why']}"
    return "ended with its machine, which was restarted" if folder.restarted() else "ended: its keeper was killed"

"""Output and displays of ranks side by side: a column for each rank, in one HTML display without a script."""

from __future__ import annotations

import collections
import html
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from .cell import Cell
from .widgets import VIEW, Widgets

#: Lines of each text, and characters of each line, that a column shows: the last ones.
_LINES, _WIDTH = 200, 500
#: Seconds from one look at the columns to the next.
_INTERVAL = 0.5
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FRAME = "border: 1px solid {colour}; border-radius: 4px; padding: 0.3em 0.6em; min-width: 0; overflow-x: auto"
_GRID = "display: grid; grid-template-columns: repeat(auto-fit, minmax(22em, 1fr)); gap: 0.5em; align-items: start"


class _Text:
    """The visible text of a rank's output after lines were overwritten, such as by progress bars."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque([""], _LINES)

    def write(self, text: str) -> None:
        first, *others = _COLOURS.sub("", text).split("\n")
        self._lines.append(_drawn(self._lines.pop() + first))
        self._lines.extend(map(_drawn, others))

    def __str__(self) -> str:
        return "\n".join(line.rstrip("\r") for line in self._lines).strip("\n")


def _drawn(line: str) -> str:
    """Return the visible part of a line, with the carriage return at its end if the next text overwrites it."""
    *_, before, last = ["", *line.split("\r")]
    return (last or (f"{before}\r" if before else ""))[-_WIDTH:]


class _Column:
    """The output of one rank in order: texts, and displays by their ids."""

    def __init__(self) -> None:
        self.parts: list[_Text | tuple[str, Mapping[str, Any]]] = []

    def write(self, text: str) -> None:
        if not self.parts or not isinstance(self.parts[-1], _Text):
            self.parts.append(_Text())
        last = self.parts[-1]
        assert isinstance(last, _Text)
        last.write(text)

    def display(self, display_id: str, data: Mapping[str, Any], update: bool) -> None:
        for number, part in enumerate(self.parts):
            if update and not isinstance(part, _Text) and part[0] == display_id:
                self.parts[number] = display_id, data
        if not update:
            self.parts.append((display_id, data))


class Columns:
    """The columns of a call's ranks in its cell.

    Args:
        cell: The cell, of a notebook.
        ranks: The number of ranks.
    """

    def __init__(self, cell: Cell, ranks: int) -> None:
        self._cell = cell
        self._columns = [_Column() for _ in range(ranks)]
        self._widgets = Widgets()
        self._failed: int | None = None
        self._display = ""
        self._shown_at = 0.0
        self._waits = False  # something is not shown yet

    def text(self, rank: int, text: str) -> None:
        self._columns[rank].write(text)
        self._changed()

    def message(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """Receive a display, or a message of a widget to its view."""
        column = self._columns[rank]
        if kind == "display":
            column.display(content["transient"].get("display_id", ""), content["data"], content["update"])
        elif kind == "clear_output":
            column.parts.clear()
        else:
            self._widgets.handle(kind, content["comm_id"], content["data"])
        self._changed()

    def failed(self, rank: int) -> None:
        """Move the first rank that fails to the front."""
        if self._failed is None:
            self._failed, self._waits = rank, True

    def _changed(self) -> None:
        if not self._shown_at:  # what comes at once is shown at once
            self._shown_at = time.monotonic()
        self._waits = True
        if time.monotonic() > self._shown_at + _INTERVAL:
            self.show()

    def show(self) -> None:
        """Show the current columns."""
        if not self._waits:
            return
        self._waits, self._shown_at = False, time.monotonic()
        order = sorted(range(len(self._columns)), key=lambda rank: rank != self._failed)
        shown = [rank for rank in order if self._columns[rank].parts or rank == self._failed]
        data = {
            "text/plain": "\n".join(self._as_text(rank) for rank in shown),
            "text/html": f'<div style="{_GRID}">{"".join(map(self._as_html, shown))}</div>',
        }
        update, self._display = bool(self._display), self._display or uuid.uuid4().hex
        transient = {"display_id": self._display}
        self._cell.message("display", {"data": data, "metadata": {}, "transient": transient, "update": update})

    def _title(self, rank: int) -> str:
        return f"rank {rank}: failed" if rank == self._failed else f"rank {rank}"

    def _as_text(self, rank: int) -> str:
        parts = [
            str(part) if isinstance(part, _Text) else str(part[1].get("text/plain", ""))
            for part in self._columns[rank].parts
        ]
        return "\n".join([f"[{self._title(rank)}]", *parts])

    def _as_html(self, rank: int) -> str:
        frame = _FRAME.format(colour="#d32f2f" if rank == self._failed else "#bbb")
        parts = [
            _preformatted(str(part)) if isinstance(part, _Text) else self._data_as_html(part[1])
            for part in self._columns[rank].parts
        ]
        return f'<div style="{frame}"><b>{self._title(rank)}</b>{"".join(parts)}</div>'

    def _data_as_html(self, data: Mapping[str, Any]) -> str:
        picture = self._widgets.picture(data[VIEW]["model_id"]) if VIEW in data else None
        if picture is not None:
            return picture
        if "text/html" in data:
            return str(data["text/html"])
        if "image/svg+xml" in data:
            return str(data["image/svg+xml"])
        for kind in ("image/png", "image/jpeg"):
            if kind in data:
                return f'<img style="max-width: 100%" src="data:{kind};base64,{data[kind]}">'
        return _preformatted(str(data.get("text/plain", "")))


def _preformatted(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'

"""What a cell shows of a call that prints more than anybody reads: the head, the tail, and how much there was."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import tempfile
import time
import uuid
from typing import IO, Any

from .cell import Cell

#: Lines of a call's output that a cell shows, if not said otherwise.
LINES = 2000
#: Characters that count as that many lines: a page takes as long to show them.
_CHARACTERS = 500
#: Lines that are shown of the end, and characters of each.
TAIL, _WIDTH = 100, 500
#: Seconds from one look at the tail to the next: a page that is drawn anew with each line cannot be used.
_INTERVAL = 1.0


class Excerpt:
    """Passes text on to a cell up to a number of lines; from then on, the cell shows the last lines and a count.

    All that was written is in a file then, until the notebook's process ends. In a terminal everything is passed on.

    Args:
        cell: Where it is shown.
        lines: How many are passed on. None: all.
    """

    def __init__(self, cell: Cell, lines: int | None) -> None:
        self._cell, self._most = cell, lines if cell.in_notebook else None
        self._head: list[str] = []
        self._lines = self._size = 0
        self._file: IO[str] | None = None
        self._last: collections.deque[str] = collections.deque()
        self._last_size = 0
        self._display = ""  # the id of what shows the tail
        self._shown_at = 0.0
        self._waits = False  # something is not shown yet

    def text(self, text: str, kind: int) -> None:
        if self._most is None:
            self._cell.text(text, kind)
            return
        self._lines += text.count("\n")
        self._size += len(text)
        if self._file is None:
            self._head.append(text)
            if self._lines <= self._most and self._size <= self._most * _CHARACTERS:
                self._cell.text(text, kind)
                return
            lines, size = self._lines - text.count("\n"), self._size - len(text)  # before it
            kept = "".join(text.splitlines(keepends=True)[: max(0, self._most - lines)])
            self._cell.text(kept[: max(0, self._most * _CHARACTERS - size)], kind)
            self._file = _new_file()
            text = "".join(self._head)
            self._head.clear()
        self._file.write(text)
        self._last.append(text)
        self._last_size += len(text)
        while self._last_size - len(self._last[0]) > TAIL * _WIDTH:
            self._last_size -= len(self._last.popleft())
        self._waits = True
        if time.monotonic() > self._shown_at + _INTERVAL:
            self.show()

    def interrupt(self) -> None:
        """Something else is shown: what follows comes below it."""
        if self._file is not None:
            self.show()
            self._display = ""

    def show(self) -> None:
        """Show the tail as it is now."""
        if self._file is None or not self._waits:
            return
        self._file.flush()
        self._waits, self._shown_at = False, time.monotonic()
        lines = "".join(self._last).splitlines()[-TAIL:]
        lines = [line.rpartition("\r")[2][:_WIDTH] for line in lines]
        title = f"... {self._lines:,} lines, of which these are the last {len(lines)}; all: {self._file.name}"
        update, self._display = bool(self._display), self._display or uuid.uuid4().hex
        data: dict[str, Any] = {"text/plain": "\n".join([title, *lines])}
        shown = {"data": data, "metadata": {}, "transient": {"display_id": self._display}, "update": update}
        self._cell.message("display", shown)


def _new_file() -> IO[str]:
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115
        "w", prefix="nbdist-output-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
    )
    atexit.register(_remove, file.name, os.getpid())
    return file


def _remove(name: str, pid: int) -> None:
    if os.getpid() == pid:  # no child of the notebook's
        with contextlib.suppress(OSError):
            os.remove(name)

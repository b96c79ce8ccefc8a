"""The part of a call's output that a cell shows: the first lines, the last lines, and the number of lines."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import IO, Any

from ...engines.forkserver import remove_if_killed
from ...system.scratch import make_held, new_name
from .cell import Cell

#: Lines of a call's output that a cell shows, if not said otherwise.
LINES = 2000
#: Characters that count as that many lines: a page takes as long to show them.
_CHARACTERS = 500
#: Lines that are shown of the end, and characters of each.
TAIL, _WIDTH = 100, 500
#: Seconds from one update of the tail to the next: a page that is drawn again with each line cannot be used.
_INTERVAL = 1.0


class Excerpt:
    """Output that is passed on to a cell up to a number of lines. If there is more, the cell shows the last lines and
    the number of all.

    The whole output is also written to a file, which is kept until the notebook's process ends, if the disk has space
    for it. In a terminal all output is passed on.

    Args:
        cell: The cell that shows the output.
        lines: The number of lines that are passed on. None: all.
        on_full: A function that is called once, when this number is reached.

    Attributes:
        most: The number of lines that are passed on; None: all.
    """

    def __init__(self, cell: Cell, lines: int | None, on_full: Callable[[], object] = lambda: None) -> None:
        self._cell, self.most = cell, lines if cell.in_notebook else None
        self._head: list[str] = []
        self._lines = self._size = 0
        self._file: IO[str] | None = None
        self._kept = ""  # the name of the file; or why there is none
        self._last: collections.deque[str] = collections.deque()
        self._last_size = 0
        self._display = ""  # the id of what shows the tail
        self._shown_at = 0.0
        self._waits = False  # something is not shown yet
        self._on_full = on_full
        self._left_out = 0  # lines that are only counted, because their text is elsewhere

    def text(self, text: str, kind: int) -> None:
        if self.most is None:
            self._cell.text(text, kind)
            return
        self._lines += text.count("\n")
        self._size += len(text)
        if not self._kept:
            self._head.append(text)
            if self._lines <= self.most and self._size <= self.most * _CHARACTERS:
                self._cell.text(text, kind)
                return
            lines, size = self._lines - text.count("\n"), self._size - len(text)  # before it
            kept = "".join(text.splitlines(keepends=True)[: max(0, self.most - lines)])
            self._cell.text(kept[: max(0, self.most * _CHARACTERS - size)], kind)
            text = self._fill()
        self._keep(text)
        self._last.append(text)
        self._last_size += len(text)
        while self._last_size - len(self._last[0]) > TAIL * _WIDTH:
            self._last_size -= len(self._last.popleft())
        self._waits = True
        if time.monotonic() > self._shown_at + _INTERVAL:
            self.show()

    def left_out(self, lines: int, size: int, begun: int = 0) -> None:
        """Count lines whose text stays on the node where they were written; `size` is the number of their characters.
        `begun` lines were shown, and counted, before their ends, which are counted later."""
        if not self._kept:
            self._keep(self._fill())
        self._lines += lines - begun
        self._size += size
        self._left_out += lines
        self._waits = True

    def _fill(self) -> str:
        """Begin to show only the last lines. Return the text so far, which is written to the file, too."""
        text = "".join(self._head)
        self._head.clear()
        self._open()
        self._on_full()
        return text

    def _open(self) -> None:
        try:
            self._file = _new_file()
            os.chmod(self._file.name, 0o600)  # a umask may have taken the user's own permissions away
            self._kept = f"all: {self._file.name}"
        except OSError as exc:
            self._give_up(exc)

    def _keep(self, text: str = "") -> None:
        """Write to the file, if it exists; without text, write all pending output."""
        if self._file is not None:
            try:
                self._file.write(text) if text else self._file.flush()
            except OSError as exc:  # the disk is full, or not there any more
                self._give_up(exc)

    def _give_up(self, why: OSError) -> None:
        """Continue without the file and delete it: a full disk must not end the call."""
        file, self._file = self._file, None
        self._kept = f"the others are in no file: {why.strerror or why}"
        if file is not None:
            with contextlib.suppress(OSError):
                os.remove(file.name)
            with contextlib.suppress(OSError):
                file.close()

    def interrupt(self) -> None:
        """Continue below another output of the cell."""
        if self._kept:
            self.show()
            self._display = ""

    def show(self) -> None:
        """Show the current last lines."""
        if not self._kept or not self._waits:
            return
        self._keep()
        self._waits, self._shown_at = False, time.monotonic()
        lines = "".join(self._last).splitlines()[-TAIL:]
        lines = [line.rpartition("\r")[2][:_WIDTH] for line in lines]
        title = f"... {self._lines:,} lines; these are the last {len(lines)}; {self._kept}"
        if self._left_out:
            title += f", but for {self._left_out:,} lines that the nodes keep: session.logs(rank)"
        update, self._display = bool(self._display), self._display or uuid.uuid4().hex
        data: dict[str, Any] = {"text/plain": "\n".join([title, *lines])}
        shown = {"data": data, "metadata": {}, "transient": {"display_id": self._display}, "update": update}
        self._cell.message("display", shown)


_folder: tuple[int, str] = 0, ""
"""The process that made the folder for these files, and the path of the folder."""


def _new_file() -> IO[str]:
    """Create a file that is removed when this process ends in any way. Raises `OSError`."""
    global _folder
    if _folder[0] != os.getpid() or not os.path.isdir(_folder[1]):
        _folder = os.getpid(), os.path.join(tempfile.gettempdir(), new_name("output-"))
        make_held(_folder[1])
        atexit.register(_remove, *_folder)
        remove_if_killed(_folder[1])
    return tempfile.NamedTemporaryFile(
        "w", dir=_folder[1], suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
    )


def _remove(pid: int, folder: str) -> None:
    if os.getpid() == pid:  # no child of the notebook's
        shutil.rmtree(folder, ignore_errors=True)

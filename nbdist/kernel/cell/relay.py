"""The output of ranks: stored in a log for each rank, and passed on to the cell if the cell shows it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

from ...engines.contract import Ranks
from ...wire.frames import MESSAGE, STDERR, STDOUT, FrameReader
from ...wire.log import Log
from .cell import Cell
from .comms import Comms
from .excerpt import LINES, Excerpt
from .tabs import Columns

#: Seconds after which a line that is not finished, such as a bar, is shown as it is.
UNFINISHED = 1.0
#: Characters of it, all ranks together, in a notebook; a terminal shows a line's width.
_WIDTH = 120


class _Line:
    """An unfinished line of a rank."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0
        self.since = time.monotonic()

    def write(self, text: str) -> None:
        self._size += len(text)
        last = text.rstrip("\r").rpartition("\r")
        if last[1] and self._size > 10 * _WIDTH:  # a bar goes on for hours, and only its last state counts
            self._parts, text = [], text[len(last[0]) + 1 :]
            self._size = len(text)
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts)

    def state(self) -> str:
        """Return the visible end of the line, and move to its start for a carriage return."""
        end = ""
        for part in reversed(self._parts):
            end = part[-4 * _WIDTH :] + end
            if len(end) > 4 * _WIDTH:
                break
        return end.rstrip("\r").rpartition("\r")[2]


class Relay:
    """The receiver of all output of ranks, which passes on the part for the cell."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.logs = [Log() for _ in ranks.pids]
        self.comms = Comms(ranks)
        self.number = 0
        """The number of the call whose output is passed on."""
        self.begin(Cell(), "none", 0)
        # By rank: what makes sense of what comes there.
        self._readers = [(FrameReader(STDOUT), FrameReader(STDERR)) for _ in ranks.pids]
        self._lines: dict[tuple[int, int], _Line] = {}  # unfinished ones, by rank and kind
        self._looked_at = 0.0

    def begin(self, cell: Cell, show: str, first: int, lines: int | None = LINES) -> None:
        """Send output to `cell` from now on.

        `show` selects the output: "rank0" (only the rank `first`), "all" (each line with its rank in front), "lines"
        (all ranks, without their numbers), "tabs" (a column for each rank; in a terminal like "all") or "none". `lines`
        is the number of lines that are shown in full; if there are more, the last ones are shown. None: all.
        """
        self._columns = Columns(cell, len(self.logs)) if show == "tabs" and cell.in_notebook else None
        self.cell, self._show, self._first = cell, "all" if show == "tabs" else show, first
        self._label = "[rank {}] " if self._show == "all" else ""
        self.number = number = self.number + 1
        self._excerpt = Excerpt(cell, lines, lambda: self._ranks.cut_output(number))
        self._seen = {STDOUT: "", STDERR: ""}  # what the cell shows of unfinished lines, at the end of its text

    @property
    def lines(self) -> int | None:
        """The number of lines after which the cell shows the last lines alone; None: it shows all."""
        return None if self._columns is not None else self._excerpt.most

    def shows(self, rank: int) -> bool:
        """Return whether the cell shows the output of a rank."""
        return self._show in ("all", "lines") or (self._show == "rank0" and rank == self._first)

    def take(self, rank: int, which: int, data: bytes) -> None:
        """Receive output of a rank from standard output (0) or standard error (1); empty bytes mean the end."""
        for kind, what in _without_overtaken(list(self._readers[rank][which].feed(data))):
            self._pass_on(rank, kind, what)
        if not data:
            self._end_line(rank)

    def take_last(self, rank: int, which: int, data: bytes) -> None:
        """Receive the last output of a rank that exits. The cell may not exist any more."""
        with contextlib.suppress(Exception):
            self.take(rank, which, data)

    def say_goodbye(self) -> None:
        """Send later output to the cell that runs at that time: the ranks leave the cell of their last call."""
        self.begin(Cell(), self._show, self._first)

    def drain(self, rank: int | None = None) -> None:
        """Receive all output so far of a rank, or of every rank."""
        for number in range(len(self._readers)) if rank is None else (rank,):
            self._ranks.drain(number, self.take)

    def _pass_on(self, rank: int, kind: int, what: Any) -> None:
        if kind == MESSAGE:
            name, content = what
            if name == "left_out":  # by the node of the rank, maybe with the rest of lines that have begun
                unfinished = list(self._lines)
                for other, _ in unfinished:
                    self._end_line(other)
                self._excerpt.left_out(**content, begun=len(unfinished))
                return
            if name == "display":
                self.logs[rank].write(content["data"].get("text/plain", "") + "\n")
            shown = self.shows(rank)
            if name.startswith("comm_"):
                self.comms.pass_on(rank, name, content, self.cell, shown and self._columns is None)
            if self._columns is not None:
                self._columns.message(rank, name, content)
                return
            if self._show == "all" and name == "display" and not content["update"]:
                self._end_line(rank)
                self._excerpt.text(f"[rank {rank}]\n", STDOUT)
            if shown:
                if not content.get("update"):
                    self._excerpt.interrupt()
                if name == "display":
                    self.comms.note_view(content, self.cell)
                if not name.startswith("comm_"):
                    self.cell.message(name, content)
            return
        self.logs[rank].write(what)
        if self._columns is not None:
            self._columns.text(rank, what)
        elif self._show == "rank0" and self.shows(rank):
            self._excerpt.text(what, kind)
        elif self._show in ("all", "lines"):
            whole, newline, rest = what.rpartition("\n")
            if newline:
                line = self._lines.pop((rank, kind), None)
                self._show_lines(rank, kind, (whole if line is None else line.text() + whole).split("\n"))
            if rest:
                self._lines.setdefault((rank, kind), _Line()).write(rest)

    def _show_lines(self, rank: int, kind: int, lines: list[str]) -> None:
        """Show finished lines, in place of the unfinished parts that were shown."""
        erased, self._seen[kind] = self._seen[kind], ""
        before = f"\r{' ' * len(erased)}\r" if erased else ""
        label = self._label.format(rank)
        self._excerpt.text(before + "".join(f"{label}{line}\n" for line in lines), kind)

    def show_unfinished(self) -> None:
        """Show lines that have been unfinished for a while, such as progress bars and dots."""
        now = time.monotonic()
        if not self._lines or now < self._looked_at + UNFINISHED / 3:
            return
        self._looked_at = now
        for kind in (STDOUT, STDERR):
            old = [(rank, line) for (rank, own), line in self._lines.items() if own == kind]
            states = {rank: line.state() for rank, line in old if now > line.since + UNFINISHED}
            if states:
                width = _WIDTH if self.cell.in_notebook else shutil.get_terminal_size().columns - 1
                each = max(1, width // len(states) - len(self._label) - 1)
                text = " ".join(f"{self._label.format(rank)}{state[-each:]}" for rank, state in sorted(states.items()))
                if text != self._seen[kind]:
                    self._excerpt.text("\r" + text.ljust(len(self._seen[kind])), kind)
                    self._seen[kind] = text

    def failed(self, rank: int) -> None:
        """Record that a rank has raised or died."""
        if self._columns is not None:
            self._columns.failed(rank)

    def _end_line(self, rank: int) -> None:
        """Show the unfinished line of a rank."""
        for kind in (STDOUT, STDERR):
            line = self._lines.pop((rank, kind), None)
            if line is not None:
                self._show_lines(rank, kind, [line.text()])

    def flush(self) -> None:
        """Show all unfinished lines at the end of a call."""
        for rank in range(len(self.logs)):
            self._end_line(rank)
        self._excerpt.show()
        if self._columns is not None:
            self._columns.show()


def _without_overtaken(frames: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield frames, without updates of a display that a later frame updates again."""
    updates = {}
    for number, (kind, what) in enumerate(frames):
        if kind == MESSAGE and what[0] == "display" and what[1]["update"]:
            updates[number] = what[1]["transient"].get("display_id")
    last = {display_id: number for number, display_id in updates.items()}
    for number, frame in enumerate(frames):
        if last.get(updates.get(number), number) == number:
            yield frame

"""The output of a node's ranks: all of it is kept here, and only the part that the cell shows is sent to the notebook.

The message of a call says whether the cell shows the output of its rank (`protocol.Call.shown`). When the cell shows
only the last lines, the kernel reports it (`cut`). From then on, a node sends the last lines of its ranks and the
number of other lines, at intervals.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ....wire.frames import MESSAGE, STDERR, STDOUT, FrameReader, frames
from ....wire.log import Log

#: Seconds from one notice of what was left out to the next.
INTERVAL = 1.0
#: Lines of the end that a cell shows, and characters that it shows of each.
TAIL, WIDTH = 100, 500
#: Characters that count as a line of a cell, as in `kernel/cell/excerpt.py`.
CHARACTERS = 500

#: A piece of output: the number of the rank on this node, its kind, and the text or the message.
Piece = tuple[int, int, Any]


class Output:
    """The output of a node's ranks.

    Args:
        count: The number of ranks.
    """

    def __init__(self, count: int) -> None:
        self.logs = [Log() for _ in range(count)]
        self._readers = [(FrameReader(STDOUT), FrameReader(STDERR)) for _ in range(count)]
        self._hidden = [False] * count
        self._call = -1  # the number of the call whose output is shown
        self._cut = False
        self._most: int | None = None  # lines of the call that are sent before the cell shows the last ones alone
        self._sent = self._sent_size = 0  # lines and characters of the call that were sent
        self._last: collections.deque[tuple[int, int, str]] = collections.deque()
        self._last_size = 0
        self._lines = self._size = 0  # that were left out since the last notice
        self._noticed = 0.0

    def begin(self, number: int, call: int, shown: bool, lines: int | None = None) -> bool:
        """Record that a rank gets a call, and return whether it is the first rank that gets this call.

        Args:
            number: The rank.
            call: The number of the call.
            shown: Whether its cell shows the output of the rank.
            lines: The number of lines after which the cell shows the last lines alone. None: it shows all.
        """
        self._hidden[number] = not shown
        new = call != self._call
        if new:
            self._call, self._cut = call, False
            self._most, self._sent, self._sent_size = lines, 0, 0
            self._forget()
        return new

    def _forget(self) -> None:
        self._lines = self._size = self._last_size = 0
        self._last.clear()

    def cut(self, call: int) -> bool:
        """Record that the cell of a call shows only the last lines from now on. Return whether this call runs."""
        self._cut = self._cut or call == self._call
        return call == self._call

    def take(self, number: int, which: int, data: bytes) -> Iterator[Piece]:
        """Receive output of a rank, and yield the pieces to send now."""
        for kind, what in self._readers[number][which].feed(data):
            if kind != MESSAGE:
                self.logs[number].write(what)
            elif what[0] == "display":
                self.logs[number].write(what[1]["data"].get("text/plain", "") + "\n")
            if kind == MESSAGE:  # widgets have a model in the kernel, whoever shows them
                if not self._hidden[number] or what[0].startswith("comm_"):
                    yield number, kind, what
            elif not self._hidden[number] and (text := self._to_show(number, kind, what)):
                yield number, kind, text

    def _to_show(self, number: int, kind: int, text: str) -> str:
        """Return the part of a text that the cell may show in full, and leave the rest out."""
        if self._cut or self._most is None:
            if self._cut:
                self.leave_out(number, kind, text)
            return "" if self._cut else text
        lines, size = self._most - self._sent, self._most * CHARACTERS - self._sent_size
        self._sent += text.count("\n")
        self._sent_size += len(text)
        if self._sent <= self._most and len(text) <= size:
            return text
        head = "".join(text.splitlines(keepends=True)[: max(0, lines)])[: max(0, size)]
        self._cut = True
        self.leave_out(number, kind, text[len(head) :])
        return head

    def leave_out(self, number: int, kind: int, text: str) -> None:
        """Count a text that a cell would show, and keep the last lines for the next notice."""
        self._lines += text.count("\n")
        self._size += len(text)
        self._remember((number, kind, text))

    def leave_out_waiting(self, pieces: Sequence[Piece]) -> None:
        """Leave out texts that wait to be sent. They are older than what was left out since the last notice."""
        newer = list(self._last)
        self._last.clear()
        self._last_size = 0
        for piece in pieces:
            self.leave_out(*piece)
        for piece in newer:
            self._remember(piece)

    def _remember(self, piece: Piece) -> None:
        self._last.append(piece)
        self._last_size += len(piece[2])
        while self._last_size - len(self._last[0][2]) > TAIL * WIDTH:
            self._last_size -= len(self._last.popleft()[2])

    def due(self) -> bool:
        """Return whether it is time for a notice of what was left out."""
        return bool(self._last) and time.monotonic() >= self._noticed + INTERVAL

    def notice(self) -> list[Piece]:
        """Return the number of lines that were left out since the last notice, and the last ones of these."""
        if not self._last:
            return []
        pieces = last_lines(self._last, TAIL)
        lines = self._lines - sum(text.count("\n") for _, _, text in pieces)
        size = self._size - sum(len(text) for _, _, text in pieces)
        self._forget()
        self._noticed = time.monotonic()
        left_out = (pieces[0][0], MESSAGE, ["left_out", {"lines": lines, "size": size}])
        return [left_out, *pieces] if lines or size else pieces


def last_lines(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Return the last lines of pieces of text, and what follows the last newline."""
    found: collections.deque[Piece] = collections.deque()
    for number, kind, text in reversed(pieces):
        if most <= 0:
            break
        lines = text.split("\n")
        found.appendleft((number, kind, "\n".join(lines[-most - 1 :])))
        most -= len(lines) - 1
    return list(found)


def encoded(kind: int, what: Any) -> bytes:
    """Return a piece as frames, in the form in which ranks write them."""
    return frames(kind, (json.dumps(what) if kind == MESSAGE else what).encode("utf-8", "backslashreplace"))

"""What ranks write, on its way to the cell: rank 0's text live, the other ranks' kept for when it is asked for."""

from __future__ import annotations

import codecs
import collections
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

#: Characters of output kept of each rank; older text is dropped first.
KEPT = 1 << 20


def attach_streams() -> None:
    """In a rank: fresh `sys.stdout` and `sys.stderr` on descriptors 1 and 2 that hold nothing back."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 (lives as long as the process)
        # Text goes out with each write, so that half a line and a dying rank's last words are seen.
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True))


class Log:
    """The last text that one rank wrote."""

    def __init__(self) -> None:
        self._chunks: collections.deque[str] = collections.deque()
        self._size = 0

    def write(self, text: str) -> None:
        self._chunks.append(text)
        self._size += len(text)
        while self._size > KEPT and len(self._chunks) > 1:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        return "".join(self._chunks)

    def tail(self, lines: int = 50) -> str:
        return "\n".join(self.text().splitlines()[-lines:])


class Relay:
    """Reads the output descriptors of all ranks and passes on what belongs in the cell.

    `show` says whose output that is: "rank0", "all" (each line with its rank before it) or "none".
    """

    def __init__(self, outputs: Sequence[tuple[int, int]], show: str) -> None:
        self.logs = [Log() for _ in outputs]
        self._show = show
        self._sources = {fd: (rank, err) for rank, pair in enumerate(outputs) for err, fd in enumerate(pair)}
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("backslashreplace") for fd in self._sources}
        self._partial = dict.fromkeys(self._sources, "")

    def descriptors(self) -> Iterator[int]:
        """The descriptors to wait for."""
        yield from self._sources

    def read(self, fd: int) -> bool:
        """Pass on what there is to read at `fd`; False at its end."""
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return True
            self._pass_on(fd, self._decoders[fd].decode(data, final=not data), last=not data)
            if not data:
                return False

    def drain(self, rank: int | None = None) -> None:
        """Pass on all that a rank, or every rank, has written so far."""
        for fd, (owner, _) in self._sources.items():
            if rank in (owner, None):
                self.read(fd)

    def _pass_on(self, fd: int, text: str, last: bool) -> None:
        rank, err = self._sources[fd]
        self.logs[rank].write(text)
        cell: TextIO = sys.stderr if err else sys.stdout
        if self._show == "rank0" and rank == 0 and text:
            cell.write(text)
            cell.flush()
        elif self._show == "all":
            *lines, rest = (self._partial[fd] + text).split("\n")
            if last and rest:
                lines, rest = [*lines, rest], ""
            self._partial[fd] = rest
            if lines:
                cell.write("".join(f"[rank {rank}] {line}\n" for line in lines))
                cell.flush()

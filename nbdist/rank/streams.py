"""A rank's standard output and standard error, which go to the kernel in frames."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from ..wire.frames import STDERR, STDOUT, FrameWriter

#: Where output and displays go. Made before the fork: it holds nothing of a rank.
writer = FrameWriter()
_attached: list[io.TextIOWrapper] = []


def attach() -> None:
    """Make `sys.stdout` and `sys.stderr` write frames without buffering, so that the last output of a rank that dies is
    not lost.
    """
    for name, fd, kind in (("stdout", 1, STDOUT), ("stderr", 2, STDERR)):
        raw: Any = _FrameStream(kind, fd)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        _attached.append(stream)
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    writer.after_fork()
    keep_lines_whole()  # several workers of a data loader print at once


def keep_lines_whole() -> None:
    """Make processes that print to the same stream at the same time write whole lines."""
    for stream in _attached:
        stream.reconfigure(write_through=False, line_buffering=True)


def flush() -> None:
    """Write the pending output of the standard streams, which may be the user's own, and closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class _FrameStream(io.RawIOBase):
    """The binary stream below a rank's `sys.stdout` or `sys.stderr`."""

    def __init__(self, kind: int, fd: int) -> None:
        self._kind, self._fd = kind, fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:  # what a child process gets as its standard output
        return self._fd

    def write(self, data: Any) -> int:
        written = bytes(data)
        writer.write(self._kind, written)
        return len(written)

"""The connection of the kernel with a rank: a channel, and pipes for the rank's output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

from ..errors import NbdistError
from ..system.limits import allow_open_files
from ..wire.channel import Channel
from .contract import Exit


class Described(Protocol):
    """Ranks of this machine, whose descriptors can all be used in `select`."""

    @property
    def pids(self) -> Sequence[int | None]:
        """Return process numbers by rank."""

    @property
    def exits_fd(self) -> int:
        """Return a descriptor that is readable when `exits()` has a result."""

    def exits(self) -> list[Exit]:
        """Return the ranks that have ended since the last call."""

    @property
    def channels(self) -> Sequence[Channel]:
        """Return, by rank, the channel for messages to and from `rank.loop.Rank`."""

    @property
    def outputs(self) -> Sequence[tuple[int, int]]:
        """Return, by rank, the descriptors of its standard output and standard error, for reading."""


def make_room(ranks: int, each: int) -> None:
    """Raise this process's limit of open files to `each` for each rank.

    Raises `NbdistError` with the number of ranks that fit, if the system does not allow more.
    """
    passing = 16  # what is open for a moment only: the ends that one rank is given, a store, a selector
    room = allow_open_files(ranks * each + passing)
    if room < ranks * each + passing:
        raise NbdistError(
            f"{ranks} ranks need {ranks * each} open files in this process, which may have {max(room, 0)} more: "
            f"{max((room - passing) // each, 0)} ranks fit. The administrator's limit (`ulimit -Hn`) has to be raised "
            f"for more, before the notebook is started"
        )


@contextlib.contextmanager
def open_descriptors(pipes: int) -> Iterator[tuple[Channel, list[int], list[int]]]:
    """Return the kernel's ends (a channel, and `pipes` descriptors to read) and the rank's ends (its socket, and the
    descriptors to write).

    At the end of the block, when the rank has its ends, they are closed here. If the block fails, the kernel's ends are
    closed, too.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        own, other = socket.socketpair()
        ours.callback(own.close)
        theirs.callback(other.close)
        reads, writes = [], [other.fileno()]
        for _ in range(pipes):
            read, write = _output_pipe()
            ours.callback(os.close, read)
            theirs.callback(os.close, write)
            reads.append(read)
            writes.append(write)
        yield Channel(own), reads, writes
        ours.pop_all()


def _output_pipe() -> tuple[int, int]:
    """Make a pipe for a rank's output: its ends for reading, without blocking, and for writing."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux, and only as far as the user's limit goes
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)  # a burst of output does not stall
    return read, write

"""The connection of the kernel with a rank: a channel, and pipes for what the rank writes."""

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
    """Ranks of this machine: all of their descriptors can be selected on."""

    @property
    def pids(self) -> Sequence[int | None]:
        """By rank."""

    @property
    def exits_fd(self) -> int:
        """Readable when `exits()` has something to say."""

    def exits(self) -> list[Exit]:
        """The ranks that ended since the last call."""

    @property
    def channels(self) -> Sequence[Channel]:
        """By rank: messages to and from `rank.loop.Rank`."""

    @property
    def outputs(self) -> Sequence[tuple[int, int]]:
        """By rank: descriptors to read what the rank writes to its standard output and standard error."""


def make_room(ranks: int, each: int) -> None:
    """Raise this process's limit of open files to `each` for each rank.

    Raises `NbdistError`, which says how many ranks fit, where the system does not allow it.
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
    """The kernel's ends (a channel, and `pipes` descriptors to read) and the rank's (its socket, and those to write).

    The rank's are closed at the end of the block, when they are handed over; the kernel's, too, if that fails.
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
    """A pipe for what a rank writes: its ends for reading, without waiting, and for writing."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux, and only as far as the user's limit goes
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 20)  # a burst of output does not stall
    return read, write

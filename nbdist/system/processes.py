"""Processes seen from others: descriptors that become readable at their end, and what children must not keep."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Protocol


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable when a process has ended; -1 where there is none: no such process, or no Linux."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """Return a descriptor of this process, for a process that must not outlive it."""
    fd = open_pidfd(os.getpid())
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def open_standard_descriptors() -> None:
    """Open /dev/null in the place of standard descriptors that are closed.

    Otherwise a socket or a pipe gets such a number, and a process that is started takes it for its input or output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def exit_status(pid: int) -> int | None:
    """Return the exit status of a process whose parent has not waited, as `subprocess` gives it; None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == b"Z" else None
    except (OSError, ValueError, IndexError):
        return None


class Holder(Protocol):
    """An owner of descriptors that show others whether this process lives."""

    def after_fork(self) -> None:
        """In a child of this process: give them up, and leave alone what they are connected with."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def forget_in_children(holder: Holder) -> None:
    """Call `holder.after_fork()` in every process that is forked from this one, as long as the object lives."""
    _holders.add(holder)


def blind(*fds: int) -> None:
    """Give up descriptors and keep their numbers: whoever still reads or closes them does no harm to another file.

    Those that are closed already have a negative number.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        if fd >= 0:
            os.dup2(null, fd, inheritable=False)
    os.close(null)


def _after_fork() -> None:
    for holder in list(_holders):
        holder.after_fork()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

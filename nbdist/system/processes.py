"""Descriptors that report the end of a process, exit statuses, and descriptors that forked children must not keep."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Protocol


def open_pidfd(pid: int) -> int:
    """Open a descriptor that is readable when a process has ended; -1 if there is no such process, or on other
    systems than Linux.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def exists(pid: int) -> bool:
    """Return whether there is such a process. One that has ended exists until its parent has asked for its status."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """Return a descriptor of this process, which another process can use to see when this process ends."""
    fd = open_pidfd(os.getpid())
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def open_standard_descriptors() -> None:
    """Open /dev/null for standard descriptors that are closed.

    Otherwise a socket or a pipe would get such a number, and a child process would use it as its standard input or
    output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def exit_status(pid: int) -> int | None:
    """Return the exit status, as in `subprocess`, of a process that its parent has not reaped; None if it is
    unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == b"Z" else None
    except (OSError, ValueError, IndexError):
        return None


class Holder(Protocol):
    """The owner of descriptors that forked children must not keep, because other processes recognize by them that
    this process has ended.
    """

    def after_fork(self) -> None:
        """Close the descriptors in a child of this process, without effect on the other ends."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register_after_fork(holder: Holder) -> None:
    """Call `holder.after_fork()` in every process that is forked from this one while `holder` lives."""
    _holders.add(holder)


def redirect_to_devnull(*fds: int) -> None:
    """Point descriptors to /dev/null. They keep their numbers, so code that reads or closes them harms no other file.

    Negative numbers stand for closed descriptors and are skipped.
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

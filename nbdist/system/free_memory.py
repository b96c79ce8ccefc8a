"""Free memory of the machine, of the container and of this process's address space.

In a container at its limit, the system kills the largest process, which may be the notebook. So the size of data is
compared with the free memory before they are written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

if sys.platform != "win32":
    import resource

#: Bytes that are left to everything else. What is smaller is not compared: to read what is free takes a moment.
_SPARE = 32 << 20
#: Bytes after which a file that grows is compared again.
_STEP = 64 << 20

_CGROUPS, _OWN_GROUPS, _MEMORY = "/sys/fs/cgroup", "/proc/self/cgroup", "/proc/meminfo"
_NO_LIMIT = 1 << 60
#: How Python, C++ and torch say that a process gets no memory, or none for the stack of a thread.
_NO_MEMORY = re.compile(r"MemoryError|bad_alloc|an't (?:allocate memory|start new thread)|annot allocate memory")


class Limit(NamedTuple):
    """A limit of memory: its owner, its size in bytes, and the free bytes below it."""

    what: str
    size: int
    free: int


def check_fits(size: int, what: str) -> None:
    """Raise `MemoryError` with both sizes if `size` further bytes of memory are not free.

    Args:
        size: The number of bytes that will be written.
        what: The name of the data for the message.
    """
    if size >= _SPARE:
        limits = [limit for limit in memory_limits() if size + _SPARE > limit.free]
        if limits:
            raise too_large(size, what, min(limits, key=lambda limit: limit.free))


class MeasuredFile(io.BytesIO):
    """A file in memory for a pickle. While it grows, its size is compared with the free memory: lists of texts and
    other small objects are in the pickle itself.

    Args:
        what: The name of the data for the message of a `MemoryError`.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._checked = what, _STEP

    def write(self, data: Any) -> int:
        end = self.tell() + memoryview(data).nbytes
        if end > self._checked:
            grown = end - self._checked + _STEP
            check_fits(grown, f"{self._what}, of which {_in_mb(self._checked)} are written")
            self._checked += grown
        return super().write(data)


def refused(size: int, what: str, number: int, fd: int = -1) -> MemoryError:
    """Return the error for `size` bytes of `what` that the system has refused. `number` is the system's error
    number, `fd` the file that was to hold them.
    """
    limit = None
    if number == errno.ENOSPC and fd >= 0:
        limit = _disk(fd)
    elif number == errno.ENOMEM:
        limit = address_space()
    elif number == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = Limit("a file (`ulimit -f`)", most, most)
    return too_large(size, what, limit)


def _disk(fd: int) -> Limit | None:
    """Return the limit of the file system of a file, which loses its content; None if it has none, as for a memfd."""
    with contextlib.suppress(OSError):
        os.truncate(fd, 0)
        found = os.fstatvfs(fd)
        if found.f_blocks:
            where = os.path.dirname(os.readlink(f"/proc/self/fd/{fd}"))
            return Limit(where, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
    return None


def too_large(size: int, what: str, limit: Limit | None) -> MemoryError:
    """Return the error for `size` bytes of `what` that do not fit. The limit is None if it is not known."""
    why = "the system does not give them"
    if limit is not None:
        why = f"{_in_mb(max(0, limit.free))} are free of the {_in_mb(limit.size)} of {limit.what}"
    return MemoryError(
        f"{what}: {_in_mb(size)} of memory are needed, and {why}. Delete what is not needed, in the notebook or in "
        f"the ranks, or use less data at a time; an array that is mapped from a file (numpy.memmap) is not copied"
    )


def _in_mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def memory_limits() -> list[Limit]:
    """Return the known limits of memory of this process."""
    found = []
    if (machine := _machine()) is not None:
        found.append(machine)
    with contextlib.suppress(OSError, ValueError, IndexError):
        found += list(_cgroups())
    return found


def address_space() -> Limit | None:
    """Return the limit of this process's address space (`ulimit -v`); None without a limit."""
    size = resource.getrlimit(resource.RLIMIT_AS)[0]
    if size == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
    return Limit("this process's address space (`ulimit -v`)", size, size - used)


def lack_of_address_space(words: str, pid: int | None = None) -> str:
    """Return a text for a process that ran out of address space, judging by the text of its error; empty if the error
    has another cause.

    Args:
        words: The last output of the process, with its error.
        pid: The process. If it has ended, or is None, the limit of this process is used.
    """
    if sys.platform != "linux" or not _NO_MEMORY.search(words):
        return ""
    try:
        size = resource.prlimit(pid or 0, resource.RLIMIT_AS)[0]
    except OSError:  # it has ended
        size = resource.getrlimit(resource.RLIMIT_AS)[0]
    if size == resource.RLIM_INFINITY:
        return ""
    return (
        f"got no memory: its address space is limited to {_in_mb(size)} (`ulimit -v`). torch's libraries take some "
        f"thousand MB of that, and each thread takes more. Raise the limit before the notebook is started"
    )


def _machine() -> Limit | None:
    try:
        found = _numbers(_MEMORY)
        return Limit("this machine", found["MemTotal:"] << 10, (found["MemAvailable:"] + found["SwapFree:"]) << 10)
    except (OSError, ValueError, KeyError):
        return None


def _cgroups() -> Iterator[Limit]:
    """Return the limits of the control groups of this process: a container's, a job's, a service's."""
    with open(_OWN_GROUPS) as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                yield from _walk(_CGROUPS, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                yield from _walk(f"{_CGROUPS}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _walk(root: str, path: str, size: str, used: str) -> Iterator[Limit]:
    """Yield the limits of a control group and of the groups above it.

    A container sees its own group at the root, while `/proc` may have a path that exists only outside the container.
    """
    folder = root + path.rstrip("/")
    while folder.startswith(root):
        with contextlib.suppress(OSError, ValueError):  # no such group here, or "max"
            limit = _number(f"{folder}/{size}")
            if limit < _NO_LIMIT:
                yield Limit("the container", limit, limit - _number(f"{folder}/{used}") + _given_back(folder))
        folder = os.path.dirname(folder)


def _given_back(folder: str) -> int:
    """Return the bytes of a control group that the system can reclaim: cached files, and memory to swap out."""
    with contextlib.suppress(OSError, ValueError):
        found = _numbers(f"{folder}/memory.stat")
        names = ("active_file", "inactive_file", "slab_reclaimable")
        # In the first version of control groups, the names of sums over the groups below begin with "total_".
        return sum(found.get(f"total_{name}", found.get(name, 0)) for name in names) + _swap(folder)
    return 0


def _swap(folder: str) -> int:
    """Return the bytes that the processes of a control group may still swap out, given the group's folder."""
    try:
        free = _numbers(_MEMORY)["SwapFree:"] << 10
    except (OSError, ValueError, KeyError):
        return 0
    if free:
        with contextlib.suppress(OSError, ValueError):  # "max"
            return min(free, _number(f"{folder}/memory.swap.max") - _number(f"{folder}/memory.swap.current"))
    return free


def _number(file: str) -> int:
    with open(file) as opened:
        return int(opened.read())


def _numbers(file: str) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line."""
    with open(file) as opened:
        parts = [line.split() for line in opened]
    return {part[0]: int(part[1]) for part in parts if len(part) > 1 and part[1].isdigit()}

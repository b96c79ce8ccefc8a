"""Read from `/proc` what a process waits for: its CPU time, its state, the system call of each thread, file locks.

Nothing is known on other systems than Linux, and about processes that this process may not read.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

#: The numbers of system calls by machine.
_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 20: "writev", 23: "poll", 45: "read", 47: "read", 61: "wait", 202: "futex",
        232: "poll", 247: "wait", 270: "poll", 271: "poll", 281: "poll",
    },
    "aarch64": {
        22: "poll", 63: "read", 64: "write", 66: "writev", 72: "poll", 73: "poll", 95: "wait", 98: "futex", 207: "read",
        212: "read", 260: "wait",
    },
}  # fmt: skip
#: Of these, the calls of epoll that have a descriptor first and a timeout fourth.
_EPOLL = {"x86_64": (232, 281), "aarch64": (22,)}
#: Looks at a process whose threads may be at rest, and seconds from one to the next.
_LOOKS, _BETWEEN_LOOKS = 6, 0.02
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_LOCK = re.compile(r"^(\d+):( +->)? \w+ +\w+ +\w+ +(\d+) ")
#: A descriptor that epoll watches, in `/proc/PID/fdinfo`.
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.M)
#: The signals that a process handles, as the bits of a number, in `/proc/PID/status`.
_HANDLED = re.compile(r"^SigCgt:\s*(\w+)", re.M)


class Use(NamedTuple):
    """The CPU time of a process so far, and its state."""

    seconds: float
    """The CPU time of all threads."""
    state: str
    """The state of the main thread, with the letters of `ps`: R runs, D waits for a disk, S sleeps, T is stopped."""


def use(pid: int) -> Use | None:
    """Return the CPU time and state of a process, or None if they are not known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return Use((int(fields[11]) + int(fields[12])) / _TICKS, fields[0].decode())
    except (OSError, ValueError, IndexError):
        return None


def threads(pid: int) -> dict[int, str]:
    """Return the state of each thread of a process, by thread number."""
    found = {}
    for thread in listed(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            found[int(thread)] = file.read().rpartition(b")")[2].split()[0].decode()
    return found


def at_rest(pid: int) -> bool:
    """Return whether no thread of a process runs or waits for a disk.

    A thread that wakes often for a moment, as gloo's do, is at rest: on a busy machine it waits for a core each time,
    and looks as if it ran. A thread that really runs is found running each time.
    """
    running: set[int] | None = None
    for number in range(_LOOKS):
        if number:
            time.sleep(_BETWEEN_LOOKS)
        now = {thread for thread, state in threads(pid).items() if state not in "SI"}
        running = now if running is None else running & now
        if not running:
            return True
    return False


def children(pid: int) -> list[int]:
    """Return the pids of the child processes of a process."""
    found: list[int] = []
    for thread in listed(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of the child processes of a process, of their child processes, and so on."""
    found = children(pid)
    for child in found:  # which grows meanwhile
        found += children(child)
    return found


class SystemCall(NamedTuple):
    """The system call in which a thread waits."""

    name: str
    """The name; "wait" for the end of a child; "futex_forever" for a lock without a timeout; empty for a call without a
    name here."""
    fd: int
    """The descriptor that the call reads or writes, or of an epoll without a timeout; -1 for other calls."""
    private: bool = False
    """True for a wait for a lock that only threads of the same process can release."""


def call(pid: int, thread: int) -> SystemCall | None:
    """Return the system call in which a thread waits; None if the thread runs, or if the call is not known."""
    try:
        with open(f"/proc/{pid}/task/{thread}/syscall") as file:
            number, *arguments = file.read().split()
        values = [int(argument, 16) for argument in arguments]
        name = _CALLS.get(platform.machine(), {}).get(int(number), "")
        if name == "futex":
            # FUTEX_WAIT and FUTEX_WAIT_BITSET, without the flags for private memory and the clock.
            forever = values[1] & 0x7F in (0, 9) and values[3] == 0
            return SystemCall("futex_forever" if forever else "futex", -1, bool(values[1] & 0x80))
        epoll = int(number) in _EPOLL.get(platform.machine(), ()) and values[3] & 0xFFFFFFFF == 0xFFFFFFFF
        return SystemCall(name, values[0] if epoll or name in ("read", "write", "writev") else -1)
    except (OSError, ValueError, IndexError):
        return None


def watched(pid: int, epoll: int) -> list[int]:
    """Return the descriptors for which a process waits in an epoll; none if they are not known."""
    try:
        with open(f"/proc/{pid}/fdinfo/{epoll}") as file:
            return [int(fd) for fd in _WATCHED.findall(file.read())]
    except OSError:
        return []


def for_one_descriptor(pid: int) -> bool:
    """Return whether the main thread of a process waits in epoll, without a timeout, for a single descriptor.

    In an event loop of `asyncio`, this is the end of a pair of sockets by which other threads of the process wake it.
    """
    now = call(pid, pid)
    return now is not None and now.name == "poll" and now.fd >= 0 and len(watched(pid, now.fd)) == 1


def handled_signals(pid: int) -> set[int]:
    """Return the numbers of the signals for which a process has a handler; none if they are not known."""
    try:
        with open(f"/proc/{pid}/status") as file:
            found = _HANDLED.search(file.read())
    except OSError:
        return set()
    bits = 0 if found is None else int(found[1], 16)
    return {number + 1 for number in range(bits.bit_length()) if bits >> number & 1}


def thread_name(pid: int, thread: int) -> str:
    """Return the name of a thread in the system; empty if it is not known."""
    try:
        with open(f"/proc/{pid}/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def stands_still(pid: int) -> bool:
    """Return whether each thread of a process waits for a lock of its own, without a timeout."""
    calls = [call(pid, thread) for thread in threads(pid)]
    return bool(calls) and all(one is not None and one.name == "futex_forever" for one in calls)


def lock_holders() -> dict[int, int]:
    """Return the process that holds a file lock (`flock`, `lockf`), by each process that waits for this lock."""
    try:
        with open("/proc/locks") as file:
            return parse_locks(file.read())
    except OSError:
        return {}


def parse_locks(text: str) -> dict[int, int]:
    """Return what `lock_holders` returns, from the text of `/proc/locks`."""
    holders: dict[str, int] = {}
    waiting: dict[int, str] = {}
    for line in text.splitlines():
        match = _LOCK.match(line)
        if match and match[2]:
            waiting[int(match[3])] = match[1]
        elif match:
            holders[match[1]] = int(match[3])
    return {pid: holders[number] for pid, number in waiting.items() if holders.get(number, -1) > 0}


def lock_holder(path: str) -> int:
    """Return the process that holds the lock of a file; -1 if none does, or if it is not known."""
    try:
        inode = os.stat(path).st_ino
        with open("/proc/locks") as file:
            held = re.search(rf"^\d+: \w+ +\w+ +\w+ +(\d+) \w+:\w+:{inode} ", file.read(), re.M)
    except OSError:
        return -1
    return -1 if held is None else int(held[1])


def listed(folder: str) -> Iterator[str]:
    """Return the names in a folder of `/proc`; none if it cannot be read."""
    with contextlib.suppress(OSError):
        yield from os.listdir(folder)

"""Read from `/proc` which processes could read what another writes, or could end the wait of another.

Nothing is known on other systems than Linux, and about processes that this process may not read.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import struct
from collections.abc import Collection, Iterable

from . import waits

#: The access mode of an open file in `/proc/PID/fdinfo`, in octal.
_FLAGS = re.compile(r"^flags:\s*(\d+)", re.M)
#: Access modes of descriptors through which a process reads, and writes.
_FOR_READING, _FOR_WRITING = (os.O_RDONLY,), (os.O_WRONLY, os.O_RDWR)
#: Beginnings of the names of threads that never wake a thread of Python code, although they wait with a timeout: they
#: belong to gloo, to torch's store, to NCCL and to CUDA.
_SILENT_THREADS = ("gloo_tcp_loop", "pt_tcpstore", "pt_nccl_", "cuda-EvtHandlr")
#: Signals whose handlers wake no thread: interrupts, errors in C code, and the two that the C library uses itself.
_SILENT_SIGNALS = {signal.SIGINT, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, 32, 33}
#: A request of Linux for the other end of a Unix socket: `nlmsghdr` and `unix_diag_req` of `linux/unix_diag.h`.
_PEER_REQUEST = struct.Struct("=IHHII BBHIIIII")
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _SHOW_PEER, _PEER = 4, 20, 4, 2
_REPLY_HEAD, _ATTRIBUTE = 32, struct.Struct("=HH")
#: The system calls in which a thread that is at rest goes on only when another process or thread does something.
_WITHOUT_TIMEOUT = ("read", "write", "writev", "wait", "futex_forever")


def full_pipe(pid: int, below: Iterable[int]) -> int | None:
    """Return a process that writes into a full pipe which only `pid` could read, although `pid` waits; None if there is
    none.

    Args:
        pid: A process that is at rest.
        below: The other processes that may write to the pipe, or have it open for reading: the processes that `pid`
            has started.
    """
    main = waits.call(pid, pid)
    if main is None or main.name not in _WITHOUT_TIMEOUT:  # it may read later
        return None
    family = (pid, *below)
    for writer in family:
        for pipe in _written_pipes(writer):
            readers = [one for one in family if _opens(one, pipe, _FOR_READING)]
            if pid in readers and all(one == pid or _is_stuck(one, pipe) for one in readers):
                return writer
    return None


def _written_pipes(pid: int) -> set[str]:
    """Return the pipes to which threads of a process are writing."""
    calls = [waits.call(pid, thread) for thread in waits.threads(pid)]
    written = {one.fd for one in calls if one is not None and one.name in ("write", "writev")}
    found = set()
    for fd in written:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {name for name in found if name.startswith("pipe:")}


def _is_stuck(pid: int, pipe: str) -> bool:
    """Return whether a process can never read a pipe, because its threads wait for locks or write to this pipe."""
    calls = [waits.call(pid, thread) for thread in waits.threads(pid)]
    stuck = all(one is not None and one.name in ("futex_forever", "write", "writev") for one in calls)
    return bool(calls) and stuck and _written_pipes(pid) == {pipe}


def wakers(pid: int, silent: Collection[int] = (), signals: Collection[int] = ()) -> set[int] | None:
    """Return the other processes that could end the waits of a process, whose threads all wait; None if the process
    may go on without them, or if they are not known.

    A thread that waits without a timeout for a lock of its own process, or for data in a pipe or a Unix socket, goes
    on only if another thread, or a process with the other end, does something.

    Args:
        pid: A process that is at rest.
        silent: Threads of it that wake no other thread.
        signals: Signals whose handlers wake no thread.
    """
    from_children = set() if waits.children(pid) else {signal.SIGCHLD}  # torch's loaders leave a handler of it
    if waits.handled_signals(pid) - _SILENT_SIGNALS - from_children - set(signals):
        return None
    found: set[int] = set()
    for thread in waits.threads(pid):
        if thread in silent or waits.thread_name(pid, thread).startswith(_SILENT_THREADS):
            continue
        now = waits.call(pid, thread)
        if now is None:
            return None
        if now.name == "futex_forever" and now.private:
            continue
        read = [now.fd] if now.name == "read" else waits.watched(pid, now.fd) if now.name == "poll" else []
        for fd in read:
            those = writers(pid, fd)
            if those is None:
                return None
            found |= those
        if not read:
            return None
    return found - {pid}


def writers(pid: int, fd: int) -> set[int] | None:
    """Return the processes that have the other end of a pipe, a FIFO or a Unix socket which `pid` reads; None if they
    are not known, and for a FIFO that no other process has open: any program may open it.
    """
    try:
        end = os.readlink(f"/proc/{pid}/fd/{fd}")
        fifo = stat.S_ISFIFO(os.stat(f"/proc/{pid}/fd/{fd}").st_mode)
        peer = _peer(int(end[len("socket:[") : -1])) if end.startswith("socket:[") else None
    except (OSError, ValueError):
        return None
    if peer is not None:
        return _holders(pid, f"socket:[{peer}]")
    if not fifo:
        return None
    found = _holders(pid, end)
    return None if found == {pid} and not end.startswith("pipe:") else found


def _holders(pid: int, end: str) -> set[int] | None:
    """Return the processes that have a pipe or socket open for writing; None if a child of `pid` may not be read."""
    below = set(waits.descendants(pid))
    found = set()
    for name in filter(str.isdigit, waits.listed("/proc")):
        other = int(name)
        if other in below and not os.access(f"/proc/{other}/fd", os.R_OK | os.X_OK):
            return None
        if _opens(other, end, _FOR_WRITING):
            found.add(other)
    return found


def _peer(inode: int) -> int | None:
    """Return the inode of the other end of a Unix socket; None if there is none, or if it is not known."""
    request = _PEER_REQUEST.pack(
        *(_PEER_REQUEST.size, _SOCK_DIAG_BY_FAMILY, 1, 1, 0),
        *(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, _SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF),
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as sock:
            sock.settimeout(1.0)
            sock.send(request)
            data = sock.recv(1 << 16)
        length, kind = struct.unpack_from("=IH", data)
        at = _REPLY_HEAD if kind == _SOCK_DIAG_BY_FAMILY else length
        while at + _ATTRIBUTE.size <= length:
            size, name = _ATTRIBUTE.unpack_from(data, at)
            if name == _PEER:
                return int(struct.unpack_from("=I", data, at + _ATTRIBUTE.size)[0]) or None
            at += max(size + 3 & ~3, _ATTRIBUTE.size)
    except (OSError, struct.error):
        pass
    return None


def _opens(pid: int, end: str, modes: Collection[int]) -> bool:
    """Return whether a process has a pipe or a socket open in one of these access modes."""
    for fd in waits.listed(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{fd}") == end:
                with open(f"/proc/{pid}/fdinfo/{fd}") as file:
                    flags = _FLAGS.search(file.read())
                if flags is not None and int(flags[1], 8) & os.O_ACCMODE in modes:
                    return True
    return False

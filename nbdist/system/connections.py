"""The TCP connections between ranks: found from outside, and shut down by a rank that leaves."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import psutil

Address = tuple[str, int]


class Connection(NamedTuple):
    """A TCP connection of a process: its own end, and the other end."""

    own: Address
    peer: Address


def connections(pids: Sequence[int | None]) -> list[list[Connection]]:
    """Return the TCP connections of each process. A process that does not exist has none.

    On Linux, all are found in one pass over the system's table, which has all connections of the machine: if every rank
    is connected to every other one, their number grows with the square of the number of ranks.
    """
    if sys.platform != "linux":
        return [[] if pid is None else _connections(pid) for pid in pids]
    owners = {inode: number for number, pid in enumerate(pids) if pid is not None for inode in _sockets(pid)}
    found: list[list[Connection]] = [[] for _ in pids]
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), open(table, "rb") as file:
            for line in file:
                _, own, peer, *_, inode = line.split(None, 10)[:10]
                number = owners.get(inode)
                if number is not None:
                    found[number].append(Connection(_address(own, family), _address(peer, family)))
    return found


def between(connections: Sequence[Sequence[Connection]]) -> list[list[Address]]:
    """Return for each process the other ends of its connections to the others."""
    owners = {connection.own: number for number, own in enumerate(connections) for connection in own}
    return [
        [connection.peer for connection in own if owners.get(connection.peer, number) != number]
        for number, own in enumerate(connections)
    ]


def cut_off(peers: Collection[Address]) -> None:
    """Shut down this process's connections to the `peers`.

    A collective waits until its peer's connection ends. torch closes gloo's connections only when nothing refers to the
    process group any more, and a `DistributedDataParallel` refers to it.
    """
    theirs = set(map(tuple, peers))
    for fd in _descriptors() if theirs else ():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = socket.socket(fileno=fd)
                try:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[:2] in theirs:
                        sock.shutdown(socket.SHUT_RDWR)
                finally:
                    sock.detach()


def _descriptors() -> Iterable[int]:
    """Return the numbers of the open descriptors, or all possible numbers if none is left for the listing."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _connections(pid: int) -> list[Connection]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return [Connection(tuple(one.laddr), tuple(one.raddr)) for one in sockets(psutil.Process(pid)) if one.raddr]
    return []


def sockets(process: psutil.Process, kind: str = "tcp") -> Any:
    """Return the connections of a process, of a `kind` that psutil knows; before psutil 6.0 the method has another
    name."""
    return (process.net_connections if hasattr(process, "net_connections") else process.connections)(kind)


def _sockets(pid: int) -> Iterator[bytes]:
    """Return the inodes of a process's sockets, as texts like in the system's tables."""
    folder = f"/proc/{pid}/fd/"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(folder + fd)
                if target.startswith("socket:["):
                    yield target[8:-1].encode()


def _address(text: bytes, family: int) -> Address:
    """Parse an address in Linux's format: 32-bit words in the machine's own order, then the port, all hexadecimal."""
    words, port = text.split(b":")
    numbers = [int(words[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(words), 8)]
    return socket.inet_ntop(family, b"".join(numbers)), int(port, 16)

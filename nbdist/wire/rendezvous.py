"""The store at which the ranks of a process group find each other, and that only they can reach. Both ends.

On one Linux machine the store is a file without a name. Elsewhere a file cannot be opened by its descriptor, and other
machines cannot open it: there the store is a `TCPStore` on a socket that already listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..system.segments import unnamed_file

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
#: The variables that name the network interface of process groups, and of torch's remote procedure calls.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_LINUX = sys.platform == "linux"


class RendezvousAddress(NamedTuple):
    """The address of a store, for the ranks."""

    host: str
    port: int
    """A port that no other group uses, for a group that `fn` makes itself."""
    store_port: int
    """The port. 0: the store is a file."""

    def environ(self) -> dict[str, str]:
        """Return the variables for a group that `fn` makes itself (`init_method="env://"`)."""
        variables = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)}
        if self.port == self.store_port:  # the port is taken: by our store
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return variables


class Rendezvous:
    """A store on the machine of rank 0, and a port that no other process can take.

    Args:
        host: The address of this machine that the ranks of other machines know; None if there are none.
    """

    def __init__(self, host: str | None = None) -> None:
        self._file = unnamed_file("nbdist-store") if _LINUX and host is None else -1
        self._sockets: list[socket.socket] = []  # of rank 0; the last one listens if the store is no file
        address = host or LOOPBACK
        if _LINUX:
            # Rank 0 may listen at the port all the same, as long as this socket does not.
            self._bind(address)
        if self._file < 0:
            self._bind(address).listen(1024)
        ports = [sock.getsockname()[1] for sock in self._sockets]
        self.address = RendezvousAddress(address, ports[0], ports[-1] if self._file < 0 else 0)

    def _bind(self, address: str) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(True)  # which `socket.setdefaulttimeout` of the notebook may have changed
        self._sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, 0))
        return sock

    def fds(self, rank: int) -> list[int]:
        """Return the descriptors for a rank. The rank keeps them as long as the group lives, except for the listening
        socket."""
        file = [self._file] if self._file >= 0 else []
        return file + ([sock.fileno() for sock in self._sockets] if rank == 0 else [])

    def close(self) -> None:
        """Close this process's part. The ranks keep their parts."""
        for sock in self._sockets:
            sock.close()
        if self._file >= 0:
            os.close(self._file)


def open_store(rank: int, world_size: int, address: RendezvousAddress, fds: Sequence[int]) -> Any:
    """Open the store in a rank, with the descriptors of `Rendezvous.fds`. The store lives as long as the group."""
    import torch.distributed as dist

    if world_size == 1 and not (address.store_port and fds):
        return dist.HashStore()  # may be in the notebook itself, which gives the descriptors up before the store
    if not address.store_port:
        return dist.FileStore(f"/proc/self/fd/{fds[0]}", world_size)
    about: dict[str, Any] = {
        "is_master": rank == 0,
        "wait_for_workers": False,
        "master_listen_fd": os.dup(fds[-1]) if rank == 0 else None,  # the store closes it
    }
    with _no_name_server():
        try:
            # torch's other server asks for the name of each rank that connects.
            return dist.TCPStore(address.host, address.store_port, world_size, use_libuv=True, **about)
        except NotImplementedError:  # the store of torch 2.5 takes no socket that listens already
            return dist.TCPStore(address.host, address.store_port, world_size, use_libuv=False, **about)


@contextlib.contextmanager
def _no_name_server() -> Iterator[None]:
    """Look up host names only in /etc/hosts, in this process.

    A `TCPStore` looks up the name of the address that it connects to (`getnameinfo` in torch's socket.cpp), only for
    its own log. If the name server is slow, absent, or drops some of many questions, each rank would wait for seconds.
    Only GNU's C library can be configured.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None) if _LINUX else None
    if configure is None:
        yield
        return
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", _host_services().encode())


def _host_services() -> str:
    """Return the sources in which this machine looks up host names, in the terms of nsswitch.conf."""
    with contextlib.suppress(OSError), open("/etc/nsswitch.conf", errors="replace") as file:
        found = re.search(r"^\s*hosts:([^#\n]*)", file.read(), re.M)
        if found and found[1].strip():
            return found[1].strip()
    return "files dns"

"""Where the ranks of a process group find each other: a store that only they can reach. Both ends are here.

On Linux the store is a file without a name. A `TCPStore` would ask the DNS for the name of 127.0.0.1 at each connection
(`getnameinfo` in torch's socket.cpp), which takes seconds where the DNS is slow or away. Elsewhere a file cannot be
opened by its descriptor, and the store is a `TCPStore` at a loopback socket that listens beforehand.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

LOOPBACK = "127.0.0.1"
_BY_FILE = sys.platform == "linux"


class MeetingPoint:
    """In the kernel: a store, and a port of the loopback interface that nobody else is given."""

    def __init__(self) -> None:
        self._file = os.memfd_create("nbdist-store", os.MFD_CLOEXEC) if _BY_FILE else -1
        self._socket = socket.socket()
        # On Linux, rank 0 may listen at the port all the same, as long as this socket does not.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]
        if not _BY_FILE:
            self._socket.listen(1024)

    def fds(self, rank: int) -> list[int]:
        """What a rank has to be given; it keeps them as long as the group lives."""
        return ([self._file] if _BY_FILE else []) + ([self._socket.fileno()] if rank == 0 else [])

    def close(self) -> None:
        """Give up this process's part. The ranks keep theirs."""
        self._socket.close()
        if self._file >= 0:
            os.close(self._file)


def environ() -> dict[str, str]:
    """What a group that `fn` makes itself (`init_method="env://"`) has to know beside the port."""
    if _BY_FILE:
        return {}
    # The port is taken: by our store.
    return {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def open_store(rank: int, world_size: int, port: int, fds: Sequence[int]) -> Any:
    """In a rank: the store, from what `MeetingPoint.fds` gave. It lives as long as the group."""
    import torch.distributed as dist

    if _BY_FILE and world_size == 1:
        return dist.HashStore()  # may be in the notebook itself, which gives the descriptors up before the store
    if _BY_FILE:
        return dist.FileStore(f"/proc/self/fd/{fds[0]}", world_size)
    listen_fd = os.dup(fds[0]) if rank == 0 else None  # the store closes it
    return dist.TCPStore(
        LOOPBACK, port, world_size, is_master=rank == 0, wait_for_workers=False, master_listen_fd=listen_fd
    )

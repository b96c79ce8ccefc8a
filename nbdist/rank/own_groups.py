"""Process groups that the function makes itself, as scripts for torchrun do.

For each group torch makes rank 0 open a store at `MASTER_PORT`, on all network interfaces, and close it with the group:
a slower rank finds the port closed, or the keys of the previous group. Here these groups meet at the session's store,
each under a prefix of its own. The connections of a group are closed when the next group is made, or at the end of the
call, because other ranks may need them until then. A store that is made by hand, or for some of the ranks, listens only
at the address of its name.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections import Counter
from importlib import import_module
from typing import Any

from ..wire.messages import World

#: Arguments of `TCPStore` after `is_master` and before `master_listen_fd`.
_BEFORE_FD = 3


class OwnGroups:
    """Replacement of torch's store for the groups that the function makes itself."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._store: Any = None
        self._made: Counter[int] = Counter()
        """The number of groups that were made so far, by the port that the code gave for meeting."""
        self._replaced: tuple[Any, Any, Any] | None = None
        """The functions that torch itself calls to open a store, to end a group, and to make a `TCPStore`."""
        self._shares = False
        """True if the last group that was made meets at the session's store."""
        self._last: Any = None

    def install(self) -> None:
        """Replace torch's functions that open a store and end a group, and the initializer of `TCPStore`."""
        if self._replaced is not None:
            return
        create, make = _rendezvous()._create_c10d_store, _dist().TCPStore.__init__
        destroy = _dist().destroy_process_group
        self._replaced = create, destroy, make

        @functools.wraps(destroy)
        def keep_and_destroy(group: Any = None) -> None:
            if self._shares and _dist().is_initialized() and group in (None, _dist().group.WORLD):
                self._last = _dist().group.WORLD
            destroy(group)

        _replace(functools.partial(self._open, create), keep_and_destroy, _listening_at_name(make))

    def uninstall(self) -> None:
        """Restore torch's own functions."""
        if self._replaced is not None:
            _replace(*self._replaced)
            self._replaced = None

    def enter(self, world: World, store: Any) -> None:
        """Make groups meet at `store` from now on."""
        self._world, self._store = world, store
        self._made.clear()

    def leave(self) -> list[Any]:
        """Forget the store, and release the objects that keep a group's connections open."""
        held = [self._store, self._last]
        self._world = self._store = self._last = None
        return held

    def _open(
        self, create: Any, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the store of a group of `world_size` ranks at a port of a host."""
        self._shares = self._is_ours(hostname, rank, world_size)
        if self._shares:
            self._made[port] += 1
            return _dist().PrefixStore(f"own/{port}/{self._made[port]}", self._store)
        return create(hostname, port, rank, world_size, *args, **kwargs)

    def _is_ours(self, hostname: str, rank: int, world_size: int) -> bool:
        """Return whether a group consists of all ranks of this session, and meets on their host or on rank 0's."""
        world = self._world
        if world is None or (rank, world_size) != (world.rank, world.world_size):
            return False
        return hostname in ("localhost", "127.0.0.1", "::1", socket.gethostname(), world.rendezvous.host)


def _listening_at_name(make: Any) -> Any:
    """Return a `TCPStore.__init__` whose store listens only at the address of its name; `make` is torch's initializer.

    torch's stores listen on all interfaces, even if the name is localhost.
    """

    @functools.wraps(make)
    def init(
        store: Any,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: Any,
        **kw: Any,
    ) -> Any:
        given = (store, host_name, port, world_size, is_master, *args)
        if is_master and kw.get("master_listen_fd") is None and len(args) < _BEFORE_FD:
            # OSError: the address is taken or not of this machine. torch says so, or has a store there already.
            with contextlib.suppress(OSError), _listening(host_name, port) as sock:
                about = {**kw, "master_listen_fd": socket.dup(sock.fileno())}
                given = (store, host_name, sock.getsockname()[1], *given[3:])
                try:
                    return make(*given, **about)
                except NotImplementedError:  # the store of torch 2.5 takes no socket that listens already
                    return make(*given, **{**about, "use_libuv": False})
        make(*given, **kw)

    return init


def _listening(host_name: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of a name, one of IPv4 if it has any."""
    found = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family)


def _dist() -> Any:
    """Return torch.distributed, which every rank has imported."""
    return import_module("torch.distributed")


def _rendezvous() -> Any:
    return import_module("torch.distributed.rendezvous")


def _replace(create: Any, destroy: Any, make: Any) -> None:
    _dist().TCPStore.__init__ = make
    _rendezvous()._create_c10d_store = create
    _dist().destroy_process_group = _dist().distributed_c10d.destroy_process_group = destroy

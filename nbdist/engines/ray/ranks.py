"""Ranks on a Ray cluster, as the kernel holds them: the same descriptors as those of local ranks.

Their other ends are in a process of their own (`driver.py`), which is Ray's driver, and from there one connection goes
to an agent on each node (`node.py`), which forks the ranks of that node as `engines/local.py` does here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

from ...errors import NbdistError
from ...notebook import kernel_shell
from ...wire.channel import Channel, readable
from ...wire.connections import Address, Connection
from ...wire.messages import Setting, Slot
from ...wire.processes import blind, forget_in_children
from ...wire.rendezvous import LOOPBACK_INTERFACE, RendezvousAddress
from ..contract import Exit
from ..descriptors import make_room, open_descriptors
from .node import Node
from .options import RayOptions
from .process import ANSWER, DriverProcess, acquire


class RayEngine:
    """Starts ranks on a cluster. Raises `NbdistError` where Ray is not installed."""

    def __init__(self, options: RayOptions, env: Mapping[str, str] | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise NbdistError('a Ray cluster needs Ray here, too: pip install "nbdist[ray]"')
        self._options, self._env = options, dict(env or {})
        self._modules: dict[str, None] = {}

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        gpus = "cuda" if self._options.gpus else "cpu"
        if devices not in (None, gpus):
            raise ValueError(
                f"devices={devices!r}: on a cluster each rank works with what Ray reserves for it, which here is "
                f"{gpus!r}. RayOptions(gpus=1) gives each rank a GPU, gpus=0 none"
            )
        return [gpus] * nranks

    def start(self, world_size: int, notice: Callable[[str], None]) -> RayRanks:
        return RayRanks(acquire(self._options, world_size, notice), list(self._modules), self._env)

    def start_workers(self, count: int, modules: Iterable[str], notice: Callable[[str], None]) -> RayRanks:
        return RayRanks(acquire(self._options, count, notice, tasks=True), list(modules), self._env)

    def warm(self, modules: Iterable[str]) -> None:
        """The nodes load them before they fork ranks; those that have forked theirs, for the next ones."""
        self._modules.update(dict.fromkeys(modules))


class RayRanks:
    """Processes on the nodes of a cluster: see `contract.Ranks`."""

    patience = 30.0  # Ray needs as long to be sure that a node is lost which just does not answer

    def __init__(self, driver: DriverProcess, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._driver, size = driver, driver.world_size
        self.pids: list[int | None] = [None] * size
        self.channels: list[Channel] = []
        self.outputs: list[tuple[int, int]] = []
        self._several = len(driver.counts) > 1
        self._alive = set(range(size))
        self._exits: Channel | None = None
        self.exits_fd = -1
        self._rendezvous = 0  # how many there were: the agent tells a question that is repeated from the next one
        self._untold: list[Exit] = []
        try:
            make_room(size, each=3)
            for _ in range(size):
                self._hand_over()
            ours, theirs = socket.socketpair()
            self._exits, self.exits_fd = Channel(ours), ours.fileno()
            with theirs:
                surroundings = list(sys.path), os.getcwd(), modules, kernel_shell() is not None
                variables = {**self.inherited(), **env}
                nodes = driver.request("start", *surroundings, variables, fds=[theirs.fileno()])
            if not isinstance(nodes, list):
                raise NbdistError(nodes or f"the ranks could not be started: the cluster {driver.why_gone()}")
            self._nodes = [Node(*node) for node in nodes]
            self.slots = [
                Slot(number, local, count, self._interface(node), driver.threads, node.shares[local])
                for number, (node, count) in enumerate(zip(self._nodes, driver.counts, strict=True))
                for local in range(count)
            ]
            forget_in_children(self)
        except BaseException:
            self._release()
            driver.stop(at_once=True)
            raise

    def after_fork(self) -> None:
        """In a child of this process: the ranks are not its own."""
        self._untold = [
            Exit(rank, None, "belongs to the process that this one was forked from") for rank in sorted(self._alive)
        ]
        self._alive.clear()
        blind(*map(Channel.fileno, self.channels), *(fd for pair in self.outputs for fd in pair), self.exits_fd)

    def _hand_over(self) -> None:
        """Make the descriptors of the next rank, and give the driver its ends."""
        with open_descriptors(pipes=2) as (channel, (out, err), theirs):
            self._driver.send("descriptors", 0, fds=theirs)
        self.channels.append(channel)
        self.outputs.append((out, err))

    def _interface(self, node: Node) -> str:
        return node.interface if self._several else LOOPBACK_INTERFACE

    def inherited(self) -> Mapping[str, str]:
        """What the notebook has set since it was started; the rest are matters of its machine."""
        started_with = psutil.Process().environ()
        return {
            name: value
            for name, value in os.environ.items()
            if started_with.get(name) != value and not name.startswith("RAY_")
        }

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        node = self._nodes[self.slots[rank].node]
        return Setting({**node.environ, **environ}, node.cwd, node.path, tuple(sys.argv))

    def rendezvous(self) -> _RemoteRendezvous:
        self._rendezvous += 1
        host, deadline = self._nodes[0].address if self._several else None, time.monotonic() + self.patience
        while (address := self._driver.ask(0, "rendezvous", self._rendezvous, host)) is None:
            self._untold = self.exits()
            if self._untold or time.monotonic() > deadline:
                raise NbdistError(
                    f"the node of rank 0 ({self._nodes[0].host}, {self._nodes[0].address}) does not answer, so that "
                    f"the ranks cannot meet. The next call starts fresh ranks"
                )
            time.sleep(0.1)
        return _RemoteRendezvous(RendezvousAddress(*address))

    def exits(self) -> list[Exit]:
        found, self._untold = self._untold, []
        while self._exits is not None and readable(self._exits):
            try:
                (rank, pid, status, reason), _, _ = self._exits.receive()
            except (EOFError, ConnectionError):
                lost = self._driver.why_gone()
                found += [Exit(rank, None, lost) for rank in sorted(self._alive)]
                self._alive.clear()
                return found
            if pid is not None:
                self.pids[rank] = pid
            else:
                self._alive.discard(rank)
                found.append(Exit(rank, status, reason))
        return found

    def signal(self, rank: int, signum: int) -> None:
        if rank in self._alive:
            with contextlib.suppress(OSError):
                self._driver.send("ask", 0, [self.slots[rank].node], "signal", (rank, signum), ANSWER)

    def abort(self, rank: int, peers: Sequence[Address]) -> None:
        if rank in self._alive:
            with contextlib.suppress(OSError):
                self._driver.send("ask", 0, [self.slots[rank].node], "abort", (rank, peers), ANSWER)

    def connections(self) -> list[list[Connection]]:
        several = len({node.address for node in self._nodes}) > 1
        found: list[list[Connection]] = []
        for count, node in zip(self._driver.counts, self._driver.ask_all("connections"), strict=True):
            ranks = node or [[] for _ in range(count)]
            found += [[Connection(*one) for one in rank if not (several and _loopback(one[0][0]))] for rank in ranks]
        return found

    def stack(self, rank: int) -> str:
        return self._driver.ask(self.slots[rank].node, "stack", rank) or ""

    def memory(self, ranks: Sequence[int]) -> dict[int, int | None]:
        nodes = self._driver.ask_all("memory", list(ranks))
        return {rank: found for node in nodes for rank, found in (node or {}).items()}

    def received(self) -> list[int | None]:
        """Bytes of big data that each node has got from the notebook."""
        return self._driver.ask_all("received")

    def close(self, grace: float = 0.0) -> None:
        if self._exits is None:
            return
        healthy = self._driver.request("close", grace, seconds=grace + 30.0)
        self._release()
        if healthy:
            self._driver.keep()
        else:
            self._driver.stop()

    def _release(self) -> None:
        for channel in (*self.channels, *([self._exits] if self._exits is not None else [])):
            channel.close()
        for fd in (fd for pair in self.outputs for fd in pair):
            os.close(fd)
        self.channels, self.outputs, self._exits, self.exits_fd = [], [], None, -1


def _loopback(ip: str) -> bool:
    """Whether every node has this address."""
    return ip.startswith("127.") or ip == "::1"


class _RemoteRendezvous:
    """A store on the node of rank 0, whose agent gives the ranks their descriptors: see `contract.OpenRendezvous`."""

    def __init__(self, address: RendezvousAddress) -> None:
        self.address = address

    def fds(self, rank: int) -> list[int]:
        return []

    def close(self) -> None: ...

"""Ranks on a Ray cluster, from the view of the kernel.

The kernel has one connection, to Ray's driver process (`driver/main.py`). The driver has a connection to an agent on
each node (`node/agent.py`), which forks the ranks of its node as `engines/local.py` does on this machine. A message to
many ranks is one message to each node, and messages of a node's ranks at about the same time are one message.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ....errors import NbdistError
from ....system.connections import Address, Connection
from ....system.limits import allow_open_files
from ....system.processes import register_after_fork
from ....wire.messages import NOTICES, Setting, Slot
from ....wire.parcel import Parcel
from ....wire.protocol import ToRank
from ....wire.rendezvous import INTERFACE_VARIABLES, LOOPBACK_INTERFACE, RendezvousAddress
from ... import origin
from ...contract import Exit, OnOutput, drop
from ...origin import Origin
from ..node.agent import Node
from ..options import RayOptions
from . import driver_process
from .driver_process import ANSWER, DriverProcess, acquire
from .inbox import Inbox, InboxListener

#: Seconds that a node may take to find the connections of its ranks: without them, ranks that wait for each other go
#: on waiting when they should leave a call.
_CONNECTIONS = 10.0
#: Seconds that a node may take to send the output that it keeps.
_LOGS = 2.0
#: Characters of output of all ranks together that are fetched from the nodes when the ranks have ended.
_AT_THE_END = 8 << 20


class RayEngine:
    """The engine for a Ray cluster. Raises `NbdistError` if Ray is not installed."""

    local = False

    def __init__(self, options: RayOptions, env: Mapping[str, str] | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise NbdistError('a Ray cluster needs Ray here, too: pip install "nbdist[ray]"')
        self._options, self._env = options, dict(env or {})
        self._modules: dict[str, None] = {}
        self.origin: Callable[[], Origin] = origin.here

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        gpus = "cuda" if self._options.gpus else "cpu"
        if devices not in (None, gpus):
            raise ValueError(
                f"devices={devices!r}: on a cluster each rank works with what Ray reserves for it, which here is "
                f"{gpus!r}. RayOptions(gpus=1) gives each rank a GPU, gpus=0 none"
            )
        return [gpus] * nranks

    def start(self, world_size: int, notice: Callable[[str], None], least: int | None = None) -> RayRanks:
        _make_room()
        return self._on(list(self._modules), world_size, notice, least=least)

    def start_workers(self, count: int, modules: Iterable[str], notice: Callable[[str], None]) -> RayRanks:
        _make_room()
        return self._on(list(modules), count, notice, tasks=True)

    def _on(self, modules: list[str], count: int, notice: Callable[[str], None], **about: Any) -> RayRanks:
        taken: list[DriverProcess] = []
        try:
            acquire(self._options, count, notice, taken, **about)
            return RayRanks(taken[0], modules, self._env, self.origin)
        except BaseException:  # an interrupt, too: nothing else would give the room back
            for driver in taken:
                driver.stop(at_once=True)
            raise

    def warm(self, modules: Iterable[str]) -> None:
        """Import modules on the nodes before they fork ranks; nodes that have forked ranks import them for the next
        ones."""
        self._modules.update(dict.fromkeys(modules))

    def idle(self, seconds: float) -> None:
        """Do nothing: `RayOptions.linger` sets how long idle processes stay on the nodes."""

    def lend(self) -> tuple[Mapping[str, str], Sequence[int]]:
        address = self._options.address or ""
        lend = driver_process.kept_by.get(address)
        return driver_process.opened_by.get(address, {}), () if lend is None else lend()

    def borrow(self, variables: Mapping[str, str]) -> None:
        if self._options.address is not None:
            driver_process.opened_by[self._options.address] = variables

    def release(self) -> None:
        driver_process.release()


def make(options: RayOptions | None, env: Mapping[str, str] | None, start: str) -> RayEngine:
    """Make the engine "ray": see `contract.MakeEngine`."""
    if start == "spawn":
        raise ValueError('start="spawn" is for ranks of this machine: those of a cluster are forked on their nodes')
    return RayEngine(options or RayOptions(address="auto"), env)


class RayRanks:
    """Processes on the nodes of a cluster: see `contract.Ranks`."""

    takes_descriptors = False
    patience = 30.0  # Ray needs as long to be sure that a node is lost which just does not answer

    def __init__(
        self, driver: DriverProcess, modules: Sequence[str], env: Mapping[str, str], of: Callable[[], Origin]
    ) -> None:
        self.driver, self._origin = driver, of
        self._several = len(driver.counts) > 1
        self._rendezvous = 0  # how many there were: the agent distinguishes a repeated question from the next
        self._gathered: list[_Sent] | None = None
        self._settings: tuple[Mapping[str, str], dict[int, Setting]] = {}, {}
        self._open = True
        self._last_logs: dict[int, str] = {}
        self._inbox = Inbox(driver)
        try:
            found = of()
            surroundings = list(found.path), found.cwd, modules, found.notebook
            nodes = driver.request("start", *surroundings, {**self.inherited(), **env})
            if not isinstance(nodes, list):
                raise NbdistError(nodes or f"the ranks could not be started: the cluster {driver.why_gone()}")
            self._nodes = [Node(*node) for node in nodes]
            self.slots = [
                Slot(number, local, count, self._interface(node), driver.threads, node.shares[local])
                for number, (node, count) in enumerate(zip(self._nodes, driver.counts, strict=True))
                for local in range(count)
            ]
            register_after_fork(self)
        except BaseException:
            self._open = False
            self._inbox.close()
            raise

    def after_fork(self) -> None:
        """Forget the ranks in a child of this process: they belong to the parent."""
        self._inbox.after_fork()

    @property
    def pids(self) -> list[int | None]:
        return self._inbox.pids

    def send(self, rank: int, message: ToRank, parcel: Parcel | None = None, fds: Iterable[int] = ()) -> None:
        assert not list(fds), "descriptors reach no other machine"
        with self.together():
            assert self._gathered is not None
            if self._gathered and self._gathered[-1].parcel is not parcel:
                self._send_off()
            self._gathered.append(_Sent(rank, "messages", message, parcel))

    def limit_sending(self, seconds: float) -> None:
        """Do nothing: messages are handed to the driver, which sends them on."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        if self._gathered is not None:  # the outer block sends them
            yield
            return
        self._gathered = []
        try:
            yield
        finally:
            try:
                self._send_off()
            finally:  # an interrupt, too: what follows must not wait for an outer block
                self._gathered = None

    def _send_off(self) -> None:
        """Send the gathered messages in one message: the driver passes the part of each node on without reading it."""
        gathered, self._gathered = self._gathered or [], []
        found: dict[str, dict[int, list[tuple[int, Any]]]] = {"messages": {}, "signals": {}, "aborts": {}}
        for rank, kind, what, _ in gathered:
            found[kind].setdefault(self.slots[rank].node, []).append((rank, what))
        messages = found.pop("messages")
        with contextlib.suppress(OSError):  # the driver is gone, which is noticed otherwise
            if messages:
                pickled = [(node, pickle.dumps(own, protocol=5)) for node, own in messages.items()]
                self.driver.send("deliver", 0, pickled, parcel=gathered[0].parcel)
            for kind, asked in found.items():
                for node, own in asked.items():
                    self.driver.send("ask", 0, [node], kind, (own,), ANSWER)

    def drain(self, rank: int, on_output: OnOutput) -> None:
        self._inbox.drain(rank, on_output)

    def logs(self, ranks: Sequence[int], most: int) -> dict[int, str]:
        return self._fetch_logs(ranks, most) if self._open else self._last_logs

    def _fetch_logs(self, ranks: Sequence[int], most: int) -> dict[int, str]:
        nodes = sorted({self.slots[rank].node for rank in ranks} & self._answering())
        if not nodes:
            return {}
        found = self.driver.request("ask", nodes, "log", (list(ranks), most), _LOGS, seconds=2 * _LOGS) or []
        return {rank: text for node in found for rank, text in (node or {}).items()}

    def _answering(self) -> set[int]:
        """Return the nodes that are not known to be lost."""
        return {slot.node for slot in self.slots} - {self.slots[rank].node for rank in list(self._inbox.lost)}

    def cut_output(self, call: int) -> None:
        with contextlib.suppress(OSError):  # the driver is gone, which is noticed otherwise
            self.driver.send("ask", 0, sorted(self._answering()), "cut", (call,), ANSWER)

    def listen(self, **handlers: Any) -> InboxListener:
        return InboxListener(self._inbox, **handlers)

    def _interface(self, node: Node) -> str:
        return node.interface if self._several else LOOPBACK_INTERFACE

    def _may_have(self, name: str) -> bool:
        """Return whether ranks get a variable. Variables that restrict connections to one machine are not used on a
        cluster."""
        return self._several or name not in INTERFACE_VARIABLES

    def inherited(self) -> Mapping[str, str]:
        """Return the variables that the notebook has set since its start; all others belong to its machine."""
        found = self._origin()
        return {
            name: found.environ[name]
            for name in sorted(found.changed)
            if not name.startswith("RAY_") and self._may_have(name)
        }

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        if self._settings[0] is not environ:
            self._settings = environ, {}
        number = self.slots[rank].node
        node, known = self._nodes[number], self._settings[1]
        if number not in known:  # all ranks of a node find the same
            own = {name: value for name, value in node.environ.items() if self._may_have(name)}
            variables = {**own, **environ, NOTICES: "1"}
            known[number] = Setting(variables, node.cwd, node.path, self._origin().argv)
        return known[number]

    def rendezvous(self) -> _RemoteRendezvous:
        self._rendezvous += 1
        host, deadline = self._nodes[0].address if self._several else None, time.monotonic() + self.patience
        while (address := self.driver.ask(0, "rendezvous", self._rendezvous, host)) is None:
            if self._inbox.any_exit() or time.monotonic() > deadline:
                raise NbdistError(
                    f"the node of rank 0 ({self._nodes[0].host}, {self._nodes[0].address}) does not answer, so that "
                    f"the ranks cannot meet. The next call starts fresh ranks"
                )
            time.sleep(0.1)
        return _RemoteRendezvous(RendezvousAddress(*address))

    def exits(self) -> list[Exit]:
        return self._inbox.exits()

    def signal(self, rank: int, signum: int) -> None:
        self._ask_for(rank, "signals", signum)

    def abort(self, rank: int, group: int, peers: Sequence[Address]) -> None:
        self._ask_for(rank, "aborts", (group, peers))

    def deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
        if rank not in self._inbox.alive:
            return False
        with contextlib.suppress(OSError):  # the driver is gone, which is noticed otherwise
            self.driver.send("ask", 0, [self.slots[rank].node], "widget", (rank, content, buffers), ANSWER)
        return True

    def _ask_for(self, rank: int, what: str, argument: Any) -> None:
        """Send the agent of a rank a request about the rank."""
        if rank in self._inbox.alive:
            with self.together():
                assert self._gathered is not None
                parcel = self._gathered[-1].parcel if self._gathered else None
                self._gathered.append(_Sent(rank, what, argument, parcel))

    def connections(self) -> list[list[Connection]]:
        several = len({node.address for node in self._nodes}) > 1
        found: list[list[Connection]] = []
        answers = self.driver.ask_all("connections", within=_CONNECTIONS)
        for count, node in zip(self.driver.counts, answers, strict=True):
            ranks = node or [[] for _ in range(count)]
            found += [[Connection(*one) for one in rank if not (several and _loopback(one[0][0]))] for rank in ranks]
        return found

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        found = {
            rank: text for node in self.driver.ask_all("stacks", list(ranks)) for rank, text in (node or {}).items()
        }
        return {rank: found.get(rank, "") for rank in ranks}

    def read_flight_recorders(self, ranks: Sequence[int]) -> None:
        """Do nothing: hangs of ranks on a cluster are not looked for, and their collectives are not recorded."""

    def starting(self) -> str:
        if all(self.pids[rank] is not None for rank in self._inbox.alive):
            return ""
        return next(filter(None, self.driver.ask_all("starting")), "")

    def memory(self, ranks: Sequence[int]) -> dict[int, int | None]:
        nodes = self.driver.ask_all("memory", list(ranks))
        return {rank: found for node in nodes for rank, found in (node or {}).items()}

    def received(self) -> list[int | None]:
        """Return the bytes of big data that each node has received from the notebook."""
        return self.driver.ask_all("received")

    def close(self, grace: float = 0.0, on_output: OnOutput = drop) -> None:
        if not self._open:
            return
        self._open = False
        try:
            healthy = self.driver.request("close", grace, seconds=grace + 30.0)
            if on_output is not drop:
                self._last_logs = self._fetch_logs(range(len(self.slots)), _AT_THE_END // len(self.slots))
            for rank in range(len(self.slots)):
                self._inbox.drain(rank, on_output)
            self._inbox.close()
            if healthy and self.driver.whole:  # with less room than was wanted, the next ones ask for all of it again
                return self.driver.keep()
        except BaseException:  # an interrupt: as long as the driver lives, so does its room
            self.driver.stop(at_once=True)
            raise
        self.driver.stop()


class _Sent(NamedTuple):
    """A message that is being sent to a rank."""

    rank: int
    kind: str
    """`messages`, or the kind of a request to its agent: `signals`, `aborts`."""
    what: Any
    """The message, the number of the signal, or the connections to cut."""
    parcel: Parcel | None


def _make_room() -> None:
    """Raise this process's limit of open files for all ranks together. Raises `NbdistError` if it is too low."""
    needed = 16
    room = allow_open_files(needed)
    if room < needed:
        raise NbdistError(
            f"the ranks of a cluster need {needed} open files in this process, which may have {max(room, 0)} more: 0 "
            f"ranks fit. The administrator's limit (`ulimit -Hn`) has to be raised, before the notebook is started"
        )


def _loopback(ip: str) -> bool:
    """Return whether an address is a loopback address, which each machine has for itself."""
    return ip.startswith("127.") or ip == "::1"


class _RemoteRendezvous:
    """A store on the node of rank 0, whose agent gives its descriptors to rank 0: see `contract.OpenRendezvous`."""

    def __init__(self, address: RendezvousAddress) -> None:
        self.address = address

    def fds(self, rank: int) -> list[int]:
        return []

    def close(self) -> None: ...

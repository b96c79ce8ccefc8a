"""Ranks on this machine, forked from the fork server; the kernel itself is never forked."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from ..devices import choose_devices
from ..system import interpreter
from ..system.connections import Address, Connection, connections
from ..system.cores import numa_nodes, shares, usable_cores
from ..system.processes import redirect_to_devnull, register_after_fork
from ..wire import rank_memory, stacks
from ..wire.channel import Channel, readable
from ..wire.forking import STACK_SIGNAL, RankDescriptors
from ..wire.messages import Setting, Slot
from ..wire.parcel import Parcel
from ..wire.protocol import Close, FromRank, ToRank
from ..wire.rendezvous import INTERFACE_VARIABLES, LOOPBACK_INTERFACE, Rendezvous
from . import forkserver, origin
from .contract import Exit, OnOutput, drop
from .descriptors import make_room, open_descriptors
from .forkserver import ForkServer, Variables, read_at_import, with_server
from .listening import Listener, drain
from .origin import Origin
from .prerequisites import check_loopback
from .watching import Watch

_shown: set[tuple[str, str]] = set()


class LocalEngine:
    """The engine for this machine. It starts ranks through this process's fork server, which it starts at first use and
    again after its death.

    `env` are variables for the ranks, in addition to the environment of this process. If imports depend on them, a
    server of its own does the imports. `start`: "forkserver", or "spawn", which starts each rank in a fresh interpreter
    without imported libraries.
    """

    local = True

    def __init__(self, env: Mapping[str, str] | None = None, start: str = "forkserver") -> None:
        self._env, self._fresh = dict(env or {}), start == "spawn"
        self._modules: dict[str, None] = {}
        self.origin: Callable[[], Origin] = origin.here

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        return choose_devices(nranks, devices, ChainMap(self._env, os.environ))

    def start(
        self, world_size: int, notice: Callable[[str], None] | None = None, least: int | None = None
    ) -> LocalRanks:
        """Start ranks. `least` has no effect: the resources of this machine do not change between starts."""
        check_loopback()
        self._warn_of_interfaces(notice)

        def start(server: ForkServer) -> LocalRanks:
            if self._fresh:
                environ = {**_inherited(), **interpreter.module_path(), **self._env}
                return LocalRanks(world_size, server, environ, self.origin)
            server.preload([*self._modules, *_rooms_of_recsys()])  # it may be new since the last call
            return LocalRanks(world_size, server, None, self.origin)

        return with_server(start, None if self._fresh else self._variables())

    def would_fork(self, ranks: LocalRanks) -> bool:
        """Return whether these ranks, which were started earlier, are of the fork server that `start` would use. They
        import what it has imported since."""
        return not self._fresh and ranks.server is forkserver.server(self._variables())

    def start_workers(
        self, count: int, modules: Iterable[str], notice: Callable[[str], None] | None = None
    ) -> LocalRanks:
        return start_workers(count, modules)

    def warm(self, modules: Iterable[str]) -> None:
        before = len(self._modules)
        self._modules.update(dict.fromkeys(["torch", "torch.distributed", *modules]))
        if len(self._modules) != before and not self._fresh:
            self._load()

    def _warn_of_interfaces(self, notice: Callable[[str], None] | None) -> None:
        """Show, once, which variables of the notebook are not used because ranks would listen to the network with
        them."""
        for name in INTERFACE_VARIABLES:
            value = os.environ.get(name, LOOPBACK_INTERFACE)
            if name in self._env or value == LOOPBACK_INTERFACE:
                continue
            if notice is not None and (name, value) not in _shown:
                _shown.add((name, value))
                notice(
                    f"{name}={value} is not used: ranks of one machine speak to each other over {LOOPBACK_INTERFACE} "
                    f"alone, where nobody else can reach them. Session(env={{{name!r}: {value!r}}}) lets them use it"
                )

    def _load(self) -> None:
        with_server(lambda server: server.preload(self._modules), self._variables())

    def idle(self, seconds: float) -> None:
        """Set the seconds after which the fork server ends when nothing uses it."""
        with_server(lambda server: server.ask("idle", seconds), self._variables())

    def lend(self) -> tuple[Mapping[str, str], Sequence[int]]:
        return {}, ()

    def borrow(self, variables: Mapping[str, str]) -> None: ...

    def release(self) -> None:
        forkserver.kill()

    def _variables(self) -> Variables:
        return read_at_import(ChainMap(self._env, os.environ))


def _rooms_of_recsys() -> list[str]:
    """Return the packages of nbdist.recsys that the notebook has imported: ranks of a session start before its calls,
    and would each import what these need."""
    return [name for name in list(sys.modules) if name.startswith("nbdist.recsys.") and name.count(".") == 2]


def make(options: None, env: Mapping[str, str] | None, start: str) -> LocalEngine:
    """Make the engine "local": see `contract.MakeEngine`."""
    return LocalEngine(env, start)


def start_workers(count: int, modules: Iterable[str]) -> LocalRanks:
    """Start processes without a process group, with these modules imported."""
    names = list(modules)

    def start(server: ForkServer) -> LocalRanks:
        server.preload(names)
        return LocalRanks(count, server)

    return with_server(start)


class LocalRanks:
    """Processes on this machine: see `contract.Ranks`."""

    takes_descriptors = True
    patience = 0.0  # they are this machine's children: it knows at once

    def __init__(
        self,
        world_size: int,
        server: ForkServer,
        environ: Mapping[str, str] | None = None,
        of: Callable[[], Origin] = origin.here,
    ) -> None:
        """Start all ranks from one server, which alone learns of their ends. Raises `ConnectionError` if it is lost.

        With an `environ` they are fresh interpreters that start with it. They work for the process that `of` describes.
        """
        self._origin = of
        self.channels: list[Channel] = []
        self.outputs: list[tuple[int, int]] = []
        self._stacks: list[socket.socket] = []  # for each rank, where it is asked for its stack
        # Another thread may ask for a stack while the ranks are given up.
        self._asking = [threading.RLock() for _ in range(world_size)]
        self._ordering = threading.RLock()  # several may have orders, and then that they are given up
        self._questions = itertools.cycle(range(1, 256))
        make_room(world_size, each=5)  # a channel, two pipes, where it is asked for its stack, and the process itself
        self._watch = Watch(world_size)
        self.server, self._number = server, -1
        try:
            self._number = server.launch(world_size, self._watch.report)
            self._watch.why_lost = server.why_lost
            self._watch.on_start = functools.partial(server.has_started, self._number)
            try:
                for rank in range(world_size):
                    self._start(rank, environ)
            except BaseException:
                with contextlib.suppress(OSError):
                    server.ask("abandon", self._number, world_size - len(self.channels))
                raise
            finally:
                self._watch.handed_over()
            register_after_fork(self)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, environ: Mapping[str, str] | None) -> None:
        asks, answers = socket.socketpair()
        answers.setblocking(True)  # which `socket.setdefaulttimeout` of the notebook may have changed
        try:
            with answers, open_descriptors(pipes=2) as (channel, reads, (own, out, err)):
                fds = RankDescriptors(own, out, err, answers.fileno())
                self.server.ask("fork", self._number, rank, environ, fds=fds)
        except BaseException:
            asks.close()
            raise
        asks.setblocking(False)
        self.channels.append(channel)
        self.outputs.append((reads[0], reads[1]))
        self._stacks.append(asks)

    def after_fork(self) -> None:
        """Forget the ranks in a child of this process: they belong to the parent."""
        self._asking, self._ordering = [threading.RLock() for _ in self._asking], threading.RLock()
        ends = [*map(Channel.fileno, self.channels), *map(socket.socket.fileno, self._stacks)]
        redirect_to_devnull(*ends, *itertools.chain.from_iterable(self.outputs))

    @property
    def pids(self) -> list[int | None]:
        return self._watch.pids

    @property
    def exits_fd(self) -> int:
        return self._watch.fd

    @property
    def slots(self) -> list[Slot]:
        cores, size = usable_cores(), len(self.pids)
        own = shares(cores, numa_nodes(), size)
        threads = max(1, len(cores) // size)
        return [Slot(0, rank, size, LOOPBACK_INTERFACE, threads, own[rank]) for rank in range(size)]

    def send(self, rank: int, message: ToRank, parcel: Parcel | None = None, fds: Iterable[int] = ()) -> None:
        self.channels[rank].send(message, parcel, fds)

    def limit_sending(self, seconds: float) -> None:
        for channel in self.channels:
            channel.limit_sending(seconds)

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # each goes its own way

    def drain(self, rank: int, on_output: OnOutput) -> None:
        for which in (0, 1):
            drain(self, rank, which, on_output)

    def logs(self, ranks: Sequence[int], most: int) -> dict[int, str]:
        return {}  # all of it is passed on

    def cut_output(self, call: int) -> None: ...

    def listen(self, **handlers: Any) -> Listener:
        return Listener(self, **handlers)

    def inherited(self) -> Mapping[str, str]:
        return _inherited()

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        found = self._origin()
        return Setting(environ, found.cwd, found.path, found.argv, rank_memory.POSSIBLE, found.standard)

    def rendezvous(self) -> Rendezvous:
        return Rendezvous()

    def connections(self) -> list[list[Connection]]:
        return connections(self.pids)

    def exits(self) -> list[Exit]:
        return self._watch.exits()

    def signal(self, rank: int, signum: int) -> None:
        self._watch.signal(rank, signum)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        with ThreadPoolExecutor(32, "nbdist: stacks") as threads:  # silent ones are waited for all at once
            return dict(zip(ranks, threads.map(self._stack, ranks), strict=True))

    def _stack(self, rank: int) -> str:
        with self._asking[rank]:
            if not self._stacks:
                return ""
            return stacks.ask(self._stacks[rank], next(self._questions), lambda: self.signal(rank, STACK_SIGNAL))

    def read_flight_recorders(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._order(rank, "flight")

    def abort(self, rank: int, group: int, peers: Sequence[Address]) -> None:
        self._order(rank, "abort", group, peers)

    def deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
        return self._order(rank, "widget", content, buffers)

    def _order(self, rank: int, *order: Any) -> bool:
        with self._ordering:
            return rank in self._watch.alive and bool(self._stacks) and stacks.order(self._stacks[rank], *order)

    def notify_of_preemption(self) -> None:
        """Notify all ranks that one of their machines will be taken away."""
        for rank in list(self._watch.alive):
            self._order(rank, "preemption")

    def memory(self, ranks: Sequence[int]) -> dict[int, int | None]:
        return {rank: _private_memory(self.pids[rank]) for rank in ranks}

    def starting(self) -> str:
        if all(self.pids[rank] is not None for rank in self._watch.alive):
            return ""
        return f"the fork server imports {', '.join(self.server.importing)}" if self.server.importing else ""

    def close(self, grace: float = 0.0, on_output: OnOutput = drop) -> None:
        if self.starting():
            self.server.break_off()
        try:
            for channel in self.channels if grace else ():
                with contextlib.suppress(OSError):
                    channel.limit_sending(grace)  # a rank that is stopped may take nothing more
                    channel.send(Close())
            self._read_last_output(grace, on_output)
        finally:  # also where an interrupt says that this takes too long
            for rank in list(self._watch.alive):
                self.signal(rank, signal.SIGKILL)
            if self._watch.alive:  # some may not have been forked yet: the server knows them as soon as they are
                with contextlib.suppress(OSError):
                    self.server.ask("abandon", self._number, 0)
            for channel in self.channels:
                channel.close()
            self._wait_for_exits(5.0)
            with contextlib.ExitStack() as nobody_asks:
                for lock in [*self._asking, self._ordering]:
                    nobody_asks.enter_context(lock)
                for fd in itertools.chain.from_iterable(self.outputs):
                    os.close(fd)
                for sock in self._stacks:
                    sock.close()
                self._watch.close()
                self.channels, self.outputs, self._stacks = [], [], []

    def _read_last_output(self, grace: float, on_output: OnOutput) -> None:
        """Wait for the ends of the ranks, and pass on their output meanwhile, because a full pipe would block a
        rank."""
        if not grace or not self._watch.alive:
            return
        deadline = time.monotonic() + grace
        listener = self.listen(on_output=on_output, on_message=_close_parcel, on_exit=lambda exit: None, pause=0.01)
        with contextlib.closing(listener):
            while any(self.pids[rank] is not None for rank in self._watch.alive) and time.monotonic() < deadline:
                listener.select(max(0.0, deadline - time.monotonic()))
        for rank in range(len(self.channels)):
            self.drain(rank, on_output)

    def _wait_for_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.exits()
        while any(self.pids[rank] is not None for rank in self._watch.alive):
            if not readable(self.exits_fd, max(0.0, deadline - time.monotonic())):
                return
            self.exits()


def _close_parcel(rank: int, message: FromRank, parcel: Parcel | None) -> None:
    """Close the parcel of an answer that comes too late."""
    if parcel is not None:
        parcel.close()


def _inherited() -> dict[str, str]:
    """Return the variables of this process that hold in ranks of this machine."""
    return {name: value for name, value in os.environ.items() if name not in INTERFACE_VARIABLES}


def _private_memory(pid: int | None) -> int | None:
    try:
        return None if pid is None else int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return None

"""A cluster of any number of nodes that are imitated in one process: Ray's driver process runs here as it is, and so
does the agent of each node. What is imitated is Ray (calls go through one socket) and the ranks (they run nothing).

A rank answers a call at once. While the file that `PRINTS` names exists, the rank first prints `LINES` lines of `WIDTH`
characters.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pickle
import queue
import resource
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from nbdist.engines.ray.driver import main as driver
from nbdist.engines.ray.driver.cluster import Link
from nbdist.engines.ray.node import agent
from nbdist.wire import protocol
from nbdist.wire.channel import Channel
from nbdist.wire.frames import STDOUT, frames
from nbdist.wire.parcel import Parcel

#: The variable that names the file.
PRINTS = "NBDIST_IMITATED_PRINTS"
#: What each rank prints: lines, characters of each.
LINES, WIDTH = 500, 80
#: Ranks of a node.
A_NODE = 8
#: Bytes that an agent reads of a rank's output at once.
_AT_ONCE = 32 << 10


class Ranks:
    """The ranks of a node, with what an agent needs of `LocalRanks`."""

    def __init__(self, count: int) -> None:
        self.pids = list(range(1, count + 1))
        self.channels = [RankChannel(self, number) for number in range(count)]
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.filled = os.eventfd(0)
        for number in self.pids:
            self.add("start", number - 1, number)

    def add(self, kind: str, *what: Any) -> None:
        self.events.put((kind, what))
        os.eventfd_write(self.filled, 1)

    def connections(self) -> list[list[Any]]:
        return [[] for _ in self.pids]

    def starting(self) -> str:
        return ""

    def notify_of_preemption(self) -> None: ...

    def close(self, grace: float, on_output: Callable[[int, int, bytes], None]) -> None:
        os.close(self.filled)


class RankChannel:
    """The connection to a rank, which answers at once."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def send(self, message: protocol.ToRank, parcel: Parcel | None, fds: Sequence[int]) -> None:
        if isinstance(message, protocol.Join):
            return
        assert isinstance(message, protocol.Call), message
        self._ranks.add("message", self._number, protocol.Begun(), None)
        if os.path.exists(os.environ[PRINTS]):
            for start in range(0, len(TEXT), _AT_ONCE):
                self._ranks.add("output", self._number, 0, TEXT[start : start + _AT_ONCE])
        value = Parcel(pickle.dumps(None), [], []) if message.answers else None
        self._ranks.add("message", self._number, protocol.Done(grouped=True), value)


#: What a rank writes: each `print` is a frame.
TEXT = frames(STDOUT, b"x" * (WIDTH - 1) + b"\n") * LINES


class Engine:
    """An engine, with what an agent needs of `LocalEngine`."""

    def __init__(self, env: Any) -> None: ...

    def warm(self, modules: Any) -> None: ...

    def start(self, count: int) -> Ranks:
        return Ranks(count)


class Listener:
    """The listener of an agent: it takes the events of imitated ranks."""

    def __init__(self, ranks: Ranks, *, pause: float, **handlers: Callable[..., None]) -> None:
        self._ranks, self._handlers = ranks, handlers
        self._poll = select.poll()
        self._poll.register(ranks.filled, select.POLLIN)

    def watch(self, fd: int, action: Any) -> None:
        self._poll.register(fd, select.POLLIN)

    def select(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(1000 * seconds):
            if fd == self._ranks.filled:
                os.eventfd_read(fd)
        while not self._ranks.events.empty():
            kind, what = self._ranks.events.get()
            self._handlers[f"on_{kind}"](*what)

    def close(self) -> None: ...


class Host:
    """The actor of a node."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        """The calls of `poll`, which have a thread of their own, as Ray gives them one."""

    def open(self, surroundings: Sequence[Any], *arguments: Any) -> Any:
        self._agent = agent.Agent(*arguments)
        return agent.describe("127.0.0.1", *surroundings)

    def poll(self, number: int) -> Any:
        return self._agent.poll(number)

    def deliver(self, *arguments: Any) -> None:
        self._agent.deliver(*arguments)

    def ask(self, *arguments: Any) -> Any:
        return self._agent.ask(*arguments)


def serve(sock: socket.socket, count: int) -> None:
    """Be all nodes: answer the driver's calls until the driver ends."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    threading.stack_size(256 << 10)
    channel, sending = Channel(sock), threading.Lock()
    hosts = [Host() for _ in range(count)]

    def answer(call: int, method: Callable[..., Any], arguments: Sequence[Any]) -> None:
        found = method(*arguments)
        with sending:
            channel.send((call, found))

    def answer_polls(host: Host) -> None:
        while True:
            call, arguments = host.asked.get()
            answer(call, host.poll, arguments)

    node = agent.describe("127.0.0.1", [], None, (), A_NODE)
    with (
        mock.patch.multiple(agent, LocalEngine=Engine, Listener=Listener, describe=lambda *about: node),
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        for host in hosts:
            threading.Thread(target=answer_polls, args=(host,), daemon=True).start()
        while True:
            try:
                call, number, method, *arguments = channel.receive()[0]
            except (EOFError, OSError):
                os._exit(0)
            if method == "poll":
                hosts[number].asked.put((call, arguments))
            else:
                pool.submit(answer, call, getattr(hosts[number], method), arguments)


class Remote:
    """The handle of an actor, as Ray gives it: `handle.method.remote(...).future()`."""

    def __init__(self, call: Callable[..., Any], *named: Any) -> None:
        self._call, self._named = call, named

    def __getattr__(self, method: str) -> Remote:
        return Remote(self._call, *self._named, method)

    def remote(self, *arguments: Any) -> Promise:
        return Promise(self._call(*self._named, *arguments))


class Promise:
    """The value of a call that Ray returns at once."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future

    def future(self) -> concurrent.futures.Future[Any]:
        return self._future


class Cluster:
    """The nodes, with what the driver needs of `Cluster`."""

    takes_folder = True

    def __init__(self, options: Any, world_size: int, say: Any, least: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        nodes = -(-world_size // A_NODE)
        self._pid = os.fork()
        if not self._pid:
            ours.close()
            serve(theirs, nodes)
        theirs.close()
        self._channel = Channel(ours)
        self._numbers = itertools.count()
        self._asked: dict[int, concurrent.futures.Future[Any]] = {}
        firsts = range(0, world_size, A_NODE)
        self.links = [
            Link(number, Remote(self._call, number), first, min(A_NODE, world_size - first))
            for number, first in enumerate(firsts)
        ]
        threading.Thread(target=self._receive, daemon=True).start()

    def _call(self, *message: Any) -> concurrent.futures.Future[Any]:
        number, future = next(self._numbers), concurrent.futures.Future[Any]()
        self._asked[number] = future
        self._channel.send((number, *message))
        return future

    def _receive(self) -> None:
        while True:
            try:
                (number, value), _, _ = self._channel.receive()
            except (EOFError, OSError):
                return
            future = self._asked.pop(number)
            if not future.cancelled():
                future.set_result(value)

    def close(self) -> None:
        self._channel.sock.shutdown(socket.SHUT_RDWR)
        os.waitpid(self._pid, 0)


def main(fd: str, kernel: str) -> None:
    """Run the driver's process, with imitated nodes."""
    import ray  # the driver asks it about the head of the cluster

    with mock.patch.object(driver, "Cluster", Cluster), mock.patch.object(ray, "cluster_resources", dict):
        driver.main(fd, kernel)

"""The process between a notebook and a Ray cluster. It is Ray's driver, in place of the kernel.

Ray ends a driver that has lost the head of its cluster ("Failed to connect to GCS within 60 seconds"), and starts
threads, handlers and loggers in it. A kernel must not have either. For the kernel, this process is the other end of one
connection. For the cluster, it owns one agent on each node (`node/agent.py`), which ends with it. Each agent has one
connection through Ray, for any number of ranks. The workers of `parallel_map` use Ray tasks instead (`tasks.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from ....wire.channel import Channel, readable
from ....wire.parcel import Parcel
from ..options import RayOptions
from .cluster import Cluster
from .connecting import Refused
from .forwarding import Forwarding, text
from .tasks import TaskCluster

#: Seconds that this process may take for its end once the kernel's process has ended. Without a limit it waits long for
#: the head of a private Ray, which ends at the same time.
CLOSING = 5.0


class Driver:
    """The part of the driver process that answers the kernel's requests.

    Args:
        control: The connection to the kernel.
        kernel: A descriptor that is closed when the kernel's process ends, because a child of the kernel may hold the
            other end of `control`; -1: none.
        cluster: The nodes.
    """

    def __init__(self, control: Channel, kernel: int, cluster: Cluster | TaskCluster) -> None:
        self._control, self._kernel, self._cluster = control, kernel, cluster
        self._requests: asyncio.Queue[tuple[tuple[Any, ...], Parcel | None] | None] = asyncio.Queue()
        self._forwarding: Forwarding | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._folders: list[str] = []  # the notebook's, for temporary files

    async def serve(self) -> None:
        """Answer requests until the kernel closes the connection, or its process ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._read)
        if self._kernel >= 0:
            loop.add_reader(self._kernel, self._gone)
        while (request := await self._requests.get()) is not None:
            await self._carry_out(*request)

    def remove_folders(self) -> None:
        """Remove the notebook's temporary files, once it has ended: if it was killed, nothing else does."""
        if self._folders and self._kernel >= 0 and readable(self._kernel, 1.0):
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    async def _carry_out(self, message: tuple[Any, ...], parcel: Parcel | None) -> None:
        kind, number, *arguments = message
        forwarding = self._forwarding
        if kind == "deliver" and forwarding is not None:
            forwarding.deliver(arguments[0], parcel)
        elif kind == "read" and forwarding is not None:
            forwarding.read(*arguments)
        elif kind == "folder":
            self._folders += arguments
        elif kind == "start":
            try:
                nodes = await self._start(*arguments)
                self._control.send(("answer", number, nodes))
            except Exception as exc:
                self._control.send(("answer", number, f"the ranks could not be started: {text(exc)}"))
        elif kind == "close" and forwarding is not None:
            healthy = await forwarding.close(*arguments)
            self._forwarding = None
            self._control.send(("answer", number, healthy))
        elif kind == "ask":
            task = asyncio.get_running_loop().create_task(self._ask(number, *arguments))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _read(self) -> None:
        try:
            message, parcel, _ = self._control.receive()
            self._requests.put_nowait((message, parcel))
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._control)
            self._requests.put_nowait(None)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._kernel)
        self._requests.put_nowait(None)

    async def _start(self, path: Sequence[str], cwd: str, *agent: Any) -> list[Any]:
        """Start ranks on all nodes; return the description of each node."""
        jobs, links = [], self._cluster.links
        for link in links:
            link.forget()
            surroundings = path, cwd if self._cluster.takes_folder else None, link.gpus, link.count
            jobs.append(link.call("open", surroundings, link.first, link.count, *agent))
        nodes = await asyncio.gather(*jobs)
        for link, node in zip(links, nodes, strict=True):
            link.name = f"node {link.number} ({node.host}, {node.address})"
        self._forwarding = Forwarding(links, self._control)
        self._forwarding.open()
        return [tuple(node) for node in nodes]

    async def _ask(
        self, number: int, nodes: Sequence[int], what: str, arguments: Sequence[Any], seconds: float
    ) -> None:
        """Send nodes a request, and return their answers to the kernel; None for a node without an answer in time."""
        links = self._cluster.links
        asked = [asyncio.wait_for(links[node].call("ask", what, *arguments), seconds) for node in nodes]
        values = await asyncio.gather(*asked, return_exceptions=True)
        if number:
            with contextlib.suppress(OSError):
                answers = [None if isinstance(value, BaseException) else value for value in values]
                self._control.send(("answer", number, answers))


def _end_with(kernel: int) -> None:
    """End this process soon after the kernel's, whatever it is doing: connecting to Ray takes up to minutes. Ray itself
    gives the resources of a driver back that has ended."""
    if kernel >= 0 and readable(kernel, math.inf):
        time.sleep(CLOSING)
        os._exit(1)


def main(fd: str, kernel: str) -> None:
    """Connect to the cluster, report to the kernel, and serve it; the descriptor `kernel` ends with the kernel's
    process."""
    threading.Thread(target=_end_with, args=(int(kernel),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the notebook is for the ranks, in order
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = Channel(socket.socket(fileno=int(fd)))
    (_, options, world_size, tasks, least), _, _ = control.receive()

    def say(text: str) -> None:
        if any(readable(end) for end in (control, int(kernel)) if end != -1):  # no process waits for this any more
            os._exit(1)
        control.send(("notice", text))

    cluster: Cluster | TaskCluster
    try:
        if tasks:
            cluster = TaskCluster(RayOptions(**options), world_size, say)
        else:
            cluster = Cluster(RayOptions(**options), world_size, say, least)
    except Refused as exc:
        control.send(("refused", str(exc)))
        return
    control.send(("ready", [link.count for link in cluster.links]))
    driver = Driver(control, int(kernel), cluster)
    try:
        asyncio.run(driver.serve())
    finally:
        driver.remove_folders()
        cluster.close()

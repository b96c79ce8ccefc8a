"""The process between a notebook and a Ray cluster. It is Ray's driver, so that the kernel need not be.

Ray ends a driver that has lost the head of its cluster ("Failed to connect to GCS within 60 seconds"), and starts
threads, handlers and loggers in it. A kernel must not have either. For the kernel, this process is the other end of one
connection. For the cluster, it owns one agent on each node (`node/agent.py`), which ends with it. Each agent has one
connection through Ray, for any number of ranks. The workers of `parallel_map` use Ray tasks instead (`tasks.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

from ....wire.channel import Channel, readable
from ....wire.parcel import Parcel
from ..options import RayOptions
from .cluster import Cluster
from .connecting import Refused
from .forwarding import Forwarding, text
from .tasks import TaskCluster


async def serve(control: Channel, kernel: int, cluster: Cluster | TaskCluster) -> None:
    """Answer the kernel's requests until it closes the connection, or its process ends."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[tuple[tuple[Any, ...], Parcel | None] | None] = asyncio.Queue()

    def read() -> None:
        try:
            message, parcel, _ = control.receive()
            requests.put_nowait((message, parcel))
        except (EOFError, ConnectionError):
            loop.remove_reader(control)
            requests.put_nowait(None)

    def gone() -> None:
        loop.remove_reader(kernel)
        requests.put_nowait(None)

    async def answer(number: int, work: Coroutine[Any, Any, Any]) -> None:
        value = await work
        if number:
            with contextlib.suppress(OSError):
                control.send(("answer", number, value))

    async def ask(nodes: Sequence[int], what: str, arguments: Sequence[Any], seconds: float) -> list[Any]:
        asked = [asyncio.wait_for(cluster.links[node].call("ask", what, *arguments), seconds) for node in nodes]
        values = await asyncio.gather(*asked, return_exceptions=True)
        return [None if isinstance(value, BaseException) else value for value in values]

    async def start(path: Sequence[str], cwd: str, *agent: Any) -> tuple[Forwarding, list[Any]]:
        jobs = []
        for link in cluster.links:
            link.forget()
            surroundings = path, cwd if cluster.takes_folder else None, link.gpus, link.count
            jobs.append(link.call("open", surroundings, link.first, link.count, *agent))
        nodes = await asyncio.gather(*jobs)
        for link, node in zip(cluster.links, nodes, strict=True):
            link.name = f"node {link.number} ({node.host}, {node.address})"
        forwarding = Forwarding(cluster.links, control)
        forwarding.open()
        return forwarding, [tuple(node) for node in nodes]

    forwarding: Forwarding | None = None
    tasks: set[asyncio.Task[None]] = set()
    loop.add_reader(control, read)
    if kernel >= 0:  # a child of it may hold the other end of `control`
        loop.add_reader(kernel, gone)
    while (request := await requests.get()) is not None:
        (kind, number, *arguments), parcel = request
        if kind == "deliver" and forwarding is not None:
            forwarding.deliver(arguments[0], parcel)
        elif kind == "read" and forwarding is not None:
            forwarding.read(*arguments)
        elif kind == "start":
            try:
                forwarding, nodes = await start(*arguments)
                control.send(("answer", number, nodes))
            except Exception as exc:
                control.send(("answer", number, f"the ranks could not be started: {text(exc)}"))
        elif kind == "close" and forwarding is not None:
            healthy = await forwarding.close(*arguments)
            forwarding = None
            control.send(("answer", number, healthy))
        elif kind == "ask":
            task = loop.create_task(answer(number, ask(*arguments)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def main(fd: str, kernel: str) -> None:
    """Connect to the cluster, report to the kernel, and serve it; the descriptor `kernel` ends with its process."""
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
    try:
        asyncio.run(serve(control, int(kernel), cluster))
    finally:
        cluster.close()

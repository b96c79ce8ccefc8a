"""In Ray's driver: all that passes between the kernel's descriptors and the agents of the nodes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import mmap
import os
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from ...wire.channel import Channel
from ...wire.parcel import Parcel
from ...wire.segments import Segment, Span
from .cluster import PATIENCE, Link
from .node import CHUNK

#: Seconds from one look at the head of the cluster to the next.
LOOK = 2.0


class SharedSegment:
    """A segment of the notebook's, on its way to the nodes."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self.size = segment, segment.size
        self._view = mmap.mmap(segment.fd, segment.size, access=mmap.ACCESS_READ)
        self._refs: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def chunk(self, start: int) -> Any:
        """A part in the object store, put there once for nodes that take it at about the same time."""
        import numpy as np
        import ray

        if start not in self._refs:
            size = min(CHUNK, self.size - start)
            self._refs[start] = ray.put(np.frombuffer(self._view, dtype=np.uint8, count=size, offset=start))
            while len(self._refs) > 4:
                self._refs.popitem(last=False)
        return self._refs[start]

    def sent(self) -> None:
        """Let the object store forget it: each node has its own copy, for all of its ranks."""
        self._refs.clear()

    def close(self) -> None:
        self.sent()
        self._segment.close()


class Forwarding:
    """The running ranks of one session, between the kernel's descriptors and the agents."""

    def __init__(self, links: Sequence[Link], fds: Sequence[Sequence[int]], exits: int) -> None:
        self._links = links
        self._link_of = {rank: link for link in links for rank in link.ranks}
        self._channels = [Channel(socket.socket(fileno=channel)) for channel, _, _ in fds]
        self._outputs = [(out, err) for _, out, err in fds]
        self._exits = Channel(socket.socket(fileno=exits))
        self._shared: dict[str, SharedSegment] = {}
        self._keep: list[str] = []
        self._alive = set(self._link_of)
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to carry messages."""
        loop = asyncio.get_running_loop()
        for rank, channel in enumerate(self._channels):
            loop.add_reader(channel, self._from_kernel, rank)
        for fd in (fd for pair in self._outputs for fd in pair):
            os.set_blocking(fd, False)
        jobs: list[Coroutine[Any, Any, None]] = [self._watch_head()]
        for link in self._links:
            jobs += [self._guarded(link, self._send(link)), self._guarded(link, self._receive(link))]
        self._tasks = [loop.create_task(job) for job in jobs]

    async def close(self, grace: float) -> bool:
        """End the ranks and give up the descriptors. Returns whether all nodes can start others."""
        loop = asyncio.get_running_loop()
        for channel in self._channels:
            loop.remove_reader(channel)
        closing = [link.call("ask", "close", grace) for link in self._links if not link.lost]
        done = await asyncio.gather(*(asyncio.wait_for(c, grace + 20.0) for c in closing), return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in (*self._channels, self._exits):
            channel.close()
        for fd in (fd for pair in self._outputs for fd in pair):
            os.close(fd)
        for shared in self._shared.values():
            shared.close()
        return not any(link.lost for link in self._links) and not any(isinstance(d, BaseException) for d in done)

    # -------------------------------------------------------------------------------------------------- to the nodes

    def _from_kernel(self, rank: int) -> None:
        try:
            message, parcel, _ = self._channels[rank].receive()
        except (EOFError, ConnectionError):
            asyncio.get_running_loop().remove_reader(self._channels[rank])
            return
        about = None
        if parcel is not None:
            about = parcel.inline, list(parcel.spans), [self._share(segment) for segment in parcel.segments]
            if about[2]:
                self._forget_all_but(about[2])
        link = self._link_of[rank]
        link.outbox.append((rank, message, about))
        link.filled.set()

    def _share(self, segment: Segment) -> str:
        """The name of a segment; one that is here already keeps it, and is not sent again."""
        status = os.fstat(segment.fd)
        key = f"{status.st_dev}:{status.st_ino}"
        if key in self._shared:
            segment.close()
        else:
            self._shared[key] = SharedSegment(segment)
        return key

    def _forget_all_but(self, keys: list[str]) -> None:
        self._keep = keys
        for key in set(self._shared) - set(keys):
            self._shared.pop(key).close()
            for link in self._links:
                link.has.discard(key)

    async def _send(self, link: Link) -> None:
        number = 0
        while True:
            await link.filled.wait()
            link.filled.clear()
            items, link.outbox = link.outbox, []
            for key in dict.fromkeys(key for _, _, about in items if about is not None for key in about[2]):
                await self._distribute(key, link)
            number += 1
            await link.call("deliver", number, items, self._keep)

    async def _distribute(self, key: str, link: Link) -> None:
        shared = self._shared.get(key)
        if key in link.has or shared is None:
            return
        link.has.add(key)
        under_way: collections.deque[Any] = collections.deque()
        for start in range(0, shared.size, CHUNK):
            storing = link.call("store", key, shared.size, start, shared.chunk(start))
            under_way.append(asyncio.ensure_future(storing))
            if len(under_way) == 2:
                await under_way.popleft()
        await asyncio.gather(*under_way)
        if all(key in other.has for other in self._links):
            shared.sent()

    # ------------------------------------------------------------------------------------------------ from the nodes

    async def _guarded(self, link: Link, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of a link as long as there is one; then its ranks are lost."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            self._lose(link, f"was lost with {link.name}, or with nbdist's process there: {text(exc)}")

    def _lose(self, link: Link, why: str) -> None:
        link.lost = link.lost or why
        for rank in sorted(self._alive & set(link.ranks)):
            self._tell_exit(rank, None, link.lost)

    def _tell_exit(self, rank: int, status: int | None, reason: str) -> None:
        self._alive.discard(rank)
        self._to_kernel(self._exits, (rank, None, status, reason))

    @staticmethod
    def _to_kernel(channel: Channel, message: tuple[Any, ...], parcel: Parcel | None = None) -> None:
        with contextlib.suppress(OSError):  # it has hung up: all ends soon
            channel.send(message, parcel)

    async def _receive(self, link: Link) -> None:
        number = 0
        while True:
            number, events = await link.call("poll", number)
            for event in events:
                if event[0] == "closed":
                    return
                await self._on_event(link, *event)

    async def _on_event(self, link: Link, kind: str, *what: Any) -> None:
        if kind == "output":
            rank, which, data = what
            await self._write(self._outputs[rank][which], memoryview(data))
        elif kind == "part":
            key, size, start, data = what
            if key not in link.incoming:
                link.incoming[key] = Segment.create(size)
            link.incoming[key].write(memoryview(data), start)
        elif kind == "message":
            rank, message, about = what
            parcel = None
            if about is not None:
                inline, spans, keys = about
                segments = [link.incoming.pop(key) for key in keys]
                parcel = Parcel(inline, [Span(*span) for span in spans], segments)
            self._to_kernel(self._channels[rank], message, parcel)
            if parcel is not None:
                parcel.close()
        elif kind == "started":
            self._to_kernel(self._exits, (*what, None, ""))
        else:
            self._tell_exit(*what)

    @staticmethod
    async def _write(fd: int, data: memoryview) -> None:
        """Write output. While the kernel does not read it, its node has to wait, and nobody else."""
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except BrokenPipeError:
                return

    async def _watch_head(self) -> None:
        """Find out that the head of the cluster is lost, before Ray ends this process for it."""
        import ray

        loop, seen = asyncio.get_running_loop(), time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            why = "it does not answer"
            try:
                await asyncio.wait_for(loop.run_in_executor(None, ray.cluster_resources), PATIENCE)
                seen = time.monotonic()
            except asyncio.CancelledError:
                raise
            except Exception as exc:
                why = str(exc).strip().partition("\n")[0] or why
            if time.monotonic() - seen > PATIENCE:
                for link in self._links:
                    self._lose(link, f"was lost: so was the head of the cluster ({why})")
                return


def text(exc: Exception) -> str:
    """What Ray says, in a line."""
    text = " ".join(str(exc).split())
    return text if len(text) <= 500 else f"{text[:200]} ... {text[-300:]}"

"""The traffic between the kernel and the agents of the nodes, in Ray's driver."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import mmap
import os
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from ....deaths import lost_with_head, lost_with_node
from ....system.segments import BufferLocation, Segment
from ....wire.channel import Channel
from ....wire.parcel import Parcel
from ....wire.protocol import Notice
from ..node.storing import CHUNK, Branch
from .cluster import PATIENCE, Link

#: Seconds from one look at the head of the cluster to the next.
LOOK = 2.0
#: Bytes of output that may wait until the kernel reads it.
UNREAD = 4 << 20


class SharedSegment:
    """A segment of the notebook that is being sent to the nodes."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self.size = segment, segment.size
        self._view = mmap.mmap(segment.fd, segment.size, access=mmap.ACCESS_READ)
        self._refs: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def chunk(self, start: int) -> Any:
        """Put a part into the object store, once for all nodes that take it at about the same time."""
        import numpy as np
        import ray

        if start not in self._refs:
            size = min(CHUNK, self.size - start)
            self._refs[start] = ray.put(np.frombuffer(self._view, dtype=np.uint8, count=size, offset=start))
            while len(self._refs) > 4:
                self._refs.popitem(last=False)
        return self._refs[start]

    def sent(self) -> None:
        """Release the data in the object store: each node has a copy for all of its ranks."""
        self._refs.clear()

    def close(self) -> None:
        self.sent()
        self._segment.close()


class Forwarding:
    """The running ranks of one session, between the kernel and the agents."""

    def __init__(self, links: Sequence[Link], kernel: Channel) -> None:
        self._links, self._kernel = links, kernel
        self._shared: dict[str, SharedSegment] = {}
        self._keep: list[str] = []
        self._unread = 0  # bytes of output that the kernel has not read
        self._more = asyncio.Event()  # it has read of them
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to forward messages."""
        loop = asyncio.get_running_loop()
        jobs: list[Coroutine[Any, Any, None]] = [self._watch_head(), self._watch_draining()]
        for link in self._links:
            jobs += [self._guarded(link, self._send(link)), self._guarded(link, self._receive(link))]
        self._tasks = [loop.create_task(job) for job in jobs]

    async def close(self, grace: float) -> bool:
        """End the ranks, and forward their last output. Returns whether all nodes can start other ranks."""
        closing = [link.call("ask", "close", grace) for link in self._links if not link.lost]
        done = await asyncio.gather(*(asyncio.wait_for(c, grace + 20.0) for c in closing), return_exceptions=True)
        for written in done:
            for item in written if isinstance(written, list) else ():
                self._forward(*item)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for shared in self._shared.values():
            shared.close()
        return not any(link.lost for link in self._links) and not any(isinstance(d, BaseException) for d in done)

    # -------------------------------------------------------------------------------------------------- to the nodes

    def deliver(self, messages: Sequence[tuple[int, bytes]], parcel: Parcel | None) -> None:
        """Send messages for ranks to their nodes. `messages` has pairs of a node's number and a pickle; `parcel`
        goes with each.
        """
        about = None
        if parcel is not None:
            about = parcel.inline, list(parcel.spans), [self._share(segment) for segment in parcel.segments]
            if about[2]:
                self._forget_all_but(about[2])
            for key in about[2]:
                self._begin_to_spread(key, [self._links[node] for node, _ in messages])
        for node, pickled in messages:
            link = self._links[node]
            link.outbox.append((pickled, about))
            link.filled.set()

    def _share(self, segment: Segment) -> str:
        """Return the name of a segment. A segment that was sent before keeps its name and is not sent again."""
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
            for key in dict.fromkeys(key for _, about in items if about is not None for key in about[2]):
                if key in link.coming:
                    await asyncio.shield(link.coming.pop(key))
            number += 1
            await link.call("deliver", number, items, self._keep)

    def _begin_to_spread(self, key: str, links: Sequence[Link]) -> None:
        # In one order always: two nodes must not wait for each other, each with a part for the other one.
        new = sorted((link for link in links if key not in link.has), key=lambda link: link.number)
        if new:
            spreading = asyncio.get_running_loop().create_task(self._spread(key, self._shared[key], new))
            self._tasks.append(spreading)
            for link in new:
                link.has.add(key)
                link.coming[key] = spreading

    async def _spread(self, key: str, shared: SharedSegment, links: Sequence[Link]) -> None:
        """Send a segment to some nodes, which pass it on to the others."""
        feeding = [self._feed(key, shared, branch) for branch in branches([link for link in links if not link.lost])]
        missed = set().union(*await asyncio.gather(*feeding)) if feeding else set()
        if missed:  # behind a node that was lost, which is reported otherwise
            await self._spread(key, shared, [link for link in links if link.number in missed])
        shared.sent()

    async def _feed(self, key: str, shared: SharedSegment, links: Sequence[Link]) -> set[int]:
        """Send a segment to the first of the `nodes`, which passes it on. Returns the nodes that it has not reached."""
        first, below = links[0], plan(links[1:])
        under_way: collections.deque[asyncio.Future[Any]] = collections.deque()
        missed: set[int] = set()
        try:
            for start in range(0, shared.size, CHUNK):
                storing = first.call("store", key, shared.size, start, shared.chunk(start), below)
                under_way.append(asyncio.ensure_future(storing))
                if len(under_way) == 2:
                    missed.update(await under_way.popleft())
            for stored in under_way:
                missed.update(await stored)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            self._lose(first, lost_with_node(first.name, text(exc)))
            await asyncio.gather(*under_way, return_exceptions=True)
            return {link.number for link in links[1:]}
        return missed

    # ------------------------------------------------------------------------------------------------ from the nodes

    async def _guarded(self, link: Link, work: Coroutine[Any, Any, None]) -> None:
        """Exchange messages with a node while it lives. Then report its ranks as lost."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            self._lose(link, lost_with_node(link.name, text(exc)))

    def _lose(self, link: Link, why: str) -> None:
        if not link.lost:
            link.lost = why
            self._forward("lost", ((link.first, link.first + link.count), why))

    def _forward(self, kind: str, what: Any, parcel: Parcel | None = None) -> None:
        with contextlib.suppress(OSError):  # it has hung up: all ends soon
            self._kernel.send(("event", kind, what), parcel)

    def read(self, size: int) -> None:
        """Record that the kernel has read this number of bytes of output."""
        self._unread -= size
        self._more.set()

    async def _receive(self, link: Link) -> None:
        number = 0
        while True:
            while self._unread > UNREAD:  # ranks whose output is not read wait
                self._more.clear()
                await self._more.wait()
            number, size, items = await link.call("poll", number)
            self._unread += size
            for item in items:
                if item[0] == "closed":
                    return
                self._on_item(link, *item)

    def _on_item(self, link: Link, kind: str, *what: Any) -> None:
        if kind == "events":
            self._forward("events", *what)
        elif kind == "part":
            key, size, start, data = what
            if key not in link.incoming:
                link.incoming[key] = Segment.create(size)
            link.incoming[key].write(memoryview(data), start)
        else:
            rank, message, (inline, spans, keys) = what
            segments = [link.incoming.pop(key) for key in keys]
            parcel = Parcel(inline, [BufferLocation(*span) for span in spans], segments)
            self._forward("answered", (rank, message), parcel)
            parcel.close()

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
                    self._lose(link, lost_with_head(why))
                return

    async def _watch_draining(self) -> None:
        """Notify all ranks when one of their nodes is about to be taken away; the cell shows which node."""
        notified: set[str] = set()
        while any(link.node_id for link in self._links):  # tasks have no nodes of their own
            await asyncio.sleep(LOOK)
            asked = next((link for link in self._links if not link.lost), None)
            if asked is None:
                return
            try:
                draining = await asyncio.wait_for(asked.call("draining"), PATIENCE)
            except asyncio.CancelledError:
                raise
            except Exception:  # a lost one is reported otherwise; another one is asked then
                continue
            new = [link for link in self._links if link.node_id in draining and link.node_id not in notified]
            notified.update(link.node_id for link in new)
            for link in new:  # before what the ranks do about it
                notice = Notice(preemption_notice(link, draining[link.node_id]))
                self._forward("answered", (link.first, notice))
            alive = [link for link in self._links if new and not link.lost]
            await asyncio.gather(*[link.call("ask", "preemption") for link in alive], return_exceptions=True)


def preemption_notice(link: Link, deadline: int) -> str:
    """Return the notice about a node that is drained; `deadline` is in milliseconds since 1970, 0: unknown."""
    left = f" in {max(0.0, deadline / 1000 - time.time()):.0f} s" if deadline else ""
    return f"{link.name} will be taken away{left}: its ranks may save what they have (nbdist.preempted())"


def branches(links: Sequence[Link]) -> list[Sequence[Link]]:
    """Divide nodes into branches. A node sends data to the first node of each branch, which passes them on."""
    half = (len(links) + 1) // 2
    return [part for part in (links[:half], links[half:]) if part]


def plan(links: Sequence[Link]) -> list[Branch]:
    """Return the tree of nodes along which data are passed on."""
    return [Branch(part[0].host, [link.number for link in part], plan(part[1:])) for part in branches(links)]


def text(exc: Exception) -> str:
    """Return the text of an exception of Ray on one line."""
    text = " ".join(str(exc).split())
    return text if len(text) <= 500 else f"{text[:200]} ... {text[-300:]}"

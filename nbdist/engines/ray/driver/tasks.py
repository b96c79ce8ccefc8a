"""The workers of `parallel_map`, in Ray's driver: each chunk of items is a Ray task.

For the rest of the driver this is one node with its agent. A message of the kernel to a worker becomes a task. Ray runs
the tasks of a worker one after the other, on any node with free resources. There `chunk.py` passes it to a process.
Nothing is reserved between tasks.
"""

from __future__ import annotations

import asyncio
import collections
import pickle
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from ....deaths import lost_with_task
from ....wire.protocol import Begin, Items, ToRank
from ..node.agent import Event, Node, packed
from ..node.chunk import is_last
from ..options import RayOptions
from . import sent
from .cluster import Link, refusal, versions, wait_for_room
from .connecting import Refused, connect
from .forwarding import text

#: A message to a worker; the pickle of its parcel and the places of its buffers in segments; and of each segment its
#: name, its size and its parts in the object store.
Message = tuple[ToRank, Any]


class TaskCluster:
    """The connection to Ray for workers that run in tasks: the counterpart of `cluster.Cluster`."""

    def __init__(self, options: RayOptions, workers: int, say: Callable[[str], None]) -> None:
        self.takes_folder = "working_dir" not in options.runtime_env
        connect(options, say)
        here = versions(options.same)
        self._try(options, here, say)
        self.links: list[Link] = [Tasks(options, workers, here)]

    @staticmethod
    def _try(options: RayOptions, here: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Check that a task can run at all, before it contains items."""
        import ray

        sent.by_value()
        trial = ray.remote(**_wanted(options))(sent.differences).remote(here)
        wait_for_room(lambda: bool(ray.wait([trial], timeout=1.0)[0]), options, 1, say)
        try:
            differences = ray.get(trial)
        except ray.exceptions.RayError as exc:
            raise Refused(f"no task can be run on the cluster: {text(exc)}") from exc
        if differences:
            raise Refused(refusal(differences))

    def close(self) -> None:
        """Give all resources back."""
        import ray

        ray.shutdown()


class Tasks(Link):
    """Ray tasks that run the chunks of one call, in place of a node's agent."""

    def __init__(self, options: RayOptions, workers: int, here: Mapping[str, str]) -> None:
        super().__init__(0, None, 0, workers)
        self._live = not str(options.address).startswith("ray://")  # Ray's client knows no generators
        self._task = _task(options, self._live)
        self._here = here
        self._call = _Call((), self.ranks)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Do the work of an agent."""
        methods: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "store": self._store,
            "deliver": self._deliver,
            "poll": self._poll,
            "ask": self._ask,
        }
        return await methods[method](*arguments)

    async def _open(self, surroundings: Any, first: int, count: int, modules: Any, notebook: bool, env: Any) -> Node:
        about = secrets.token_hex(8), self._here, surroundings, modules, notebook, env
        self._call = _Call(about, self.ranks)
        return Node("", "the cluster", "", {}, "", (), [[] for _ in range(count)])

    async def _store(self, key: str, size: int, start: int, part: Any, below: Sequence[Any]) -> set[int]:
        self._call.segments.setdefault(key, (size, {}))[1][start] = part
        return set()

    async def _deliver(self, number: int, items: Sequence[tuple[bytes, Any]], keep: Sequence[str]) -> None:
        segments = self._call.segments
        for pickled, about in items:
            if about is not None:
                inline, spans, keys = about
                about = inline, [tuple(span) for span in spans], [(key, *segments[key]) for key in keys]
            for rank, message in pickle.loads(pickled):
                self._take(rank, message, about)
        for key in set(segments) - set(keep):
            del segments[key]

    def _take(self, rank: int, message: ToRank, about: Any) -> None:
        call = self._call
        if isinstance(message, Begin):
            call.begun[rank] = message, about
        elif isinstance(message, Items):
            call.waiting[rank].append((message, about))
            if rank not in call.jobs:
                call.jobs[rank] = asyncio.get_running_loop().create_task(self._work(call, rank))

    async def _poll(self, number: int) -> tuple[int, int, list[Event]]:
        queue = self._call.events
        events = [await queue.get()]
        while not queue.empty():
            events.append(queue.get_nowait())
        if ("closed",) in events:
            return number + 1, 0, [("closed",)]
        output = sum(len(event[-1]) for event in events if event[0] == "output")
        return number + 1, output, list(packed(events))

    async def _ask(self, what: str, *arguments: Any) -> Any:
        if what == "received":  # the question whether it lives
            return 0
        call = self._call
        if what == "signals":
            for rank, signum in arguments[0]:
                call.cancel(rank, signum == signal.SIGKILL)
        elif what == "close":
            for rank in self.ranks:
                call.cancel(rank)
            if call.jobs:
                _, late = await asyncio.wait(list(call.jobs.values()), timeout=max(arguments[0], 1.0))
                for rank in [rank for rank, job in call.jobs.items() if job in late]:
                    call.cancel(rank, force=True)
            call.segments.clear()
            call.events.put_nowait(("closed",))
        return None

    async def _work(self, call: _Call, rank: int) -> None:
        """Run the waiting chunks of a worker, one task after another."""
        try:
            while call.waiting[rank]:
                async for event in self._done(call, rank, call.waiting[rank].popleft()):
                    call.events.put_nowait(_of_worker(rank, event))
                    if event[0] == "exit":
                        call.waiting[rank].clear()
        finally:
            call.running.pop(rank, None)
            call.jobs.pop(rank, None)

    async def _done(self, call: _Call, rank: int, items: Message) -> AsyncIterator[Event]:
        """Yield the events of a chunk while a task works on it."""
        import ray

        ended = False
        try:
            task = call.running[rank] = self._task.remote(*call.about, call.begun[rank], items)
            async for events in self._answers(task):
                for event in events:
                    ended = ended or is_last(event)
                    yield event
        except ray.exceptions.TaskCancelledError:
            if not ended:
                yield "exit", rank, -signal.SIGINT, ""
        except Exception as exc:
            if not ended:
                yield "exit", rank, None, lost_with_task(text(exc))

    async def _answers(self, task: Any) -> AsyncIterator[list[Event]]:
        if self._live:
            async for part in task:
                yield await part
        else:
            yield await asyncio.wrap_future(task.future())


class _Call:
    """The state of one call. A task that ends late, after its call, reports to its own call and not to the next one."""

    def __init__(self, about: Sequence[Any], ranks: Iterable[int]) -> None:
        self.about = about
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.segments: dict[str, tuple[int, dict[int, Any]]] = {}
        self.begun: dict[int, Message] = {}
        self.waiting: dict[int, collections.deque[Message]] = {rank: collections.deque() for rank in ranks}
        self.jobs: dict[int, asyncio.Task[None]] = {}
        self.running: dict[int, Any] = {}

    def cancel(self, rank: int, force: bool = False) -> None:
        """Interrupt a worker; `force` ends the Ray process in which it works."""
        import ray

        self.waiting[rank].clear()
        if rank in self.running:
            ray.cancel(self.running[rank], force=force)


def _of_worker(rank: int, event: Event) -> Event:
    """Convert an event of a task, in which each worker has the number 0 and counts its own messages."""
    kind, first, *rest = event
    if kind == "part":
        return (kind, f"{rank}:{first}", *rest)
    if kind == "message":
        return (kind, [rank], *rest)
    if kind == "answered":
        message, (inline, spans, keys) = rest
        return kind, rank, message, (inline, spans, [f"{rank}:{key}" for key in keys])
    return (kind, rank, *rest)


def _wanted(options: RayOptions) -> dict[str, Any]:
    """Return the resources of a task in Ray's terms."""
    resources = dict(options.resources)
    wanted: dict[str, Any] = {"num_cpus": options.cpus, "num_gpus": options.gpus, "resources": resources}
    if "memory" in resources:
        wanted["memory"] = resources.pop("memory")
    if options.labels:
        wanted["label_selector"] = dict(options.labels)
    wanted["scheduling_strategy"] = "SPREAD" if options.placement in ("spread", "strict_spread") else "DEFAULT"
    wanted["max_retries"] = 0  # what an item does to files or tables must not be done again unasked
    return wanted


def _task(options: RayOptions, live: bool) -> Any:
    """Return the function that works on a chunk on a node, in the form that Ray takes."""
    import ray

    if live:
        return ray.remote(num_returns="streaming", **_wanted(options))(sent.work)
    return ray.remote(**_wanted(options))(sent.work_at_once)

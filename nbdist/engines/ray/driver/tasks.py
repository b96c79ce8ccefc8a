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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._reset(())

    def _reset(self, about: Sequence[Any]) -> None:
        self._about = secrets.token_hex(8), self._here, *about
        self._segments: dict[str, tuple[int, dict[int, Any]]] = {}
        self._begun: dict[int, Message] = {}
        self._waiting: dict[int, collections.deque[Message]] = {rank: collections.deque() for rank in self.ranks}
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, Any] = {}

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
        self._reset((surroundings, modules, notebook, env))
        self._events = asyncio.Queue()
        return Node("", "the cluster", "", {}, "", (), [[] for _ in range(count)])

    async def _store(self, key: str, size: int, start: int, part: Any, below: Sequence[Any]) -> set[int]:
        self._segments.setdefault(key, (size, {}))[1][start] = part
        return set()

    async def _deliver(self, number: int, items: Sequence[tuple[bytes, Any]], keep: Sequence[str]) -> None:
        for pickled, about in items:
            if about is not None:
                inline, spans, keys = about
                about = inline, [tuple(span) for span in spans], [(key, *self._segments[key]) for key in keys]
            for rank, message in pickle.loads(pickled):
                self._take(rank, message, about)
        for key in set(self._segments) - set(keep):
            del self._segments[key]

    def _take(self, rank: int, message: ToRank, about: Any) -> None:
        if isinstance(message, Begin):
            self._begun[rank] = message, about
        elif isinstance(message, Items):
            self._waiting[rank].append((message, about))
            if rank not in self._jobs:
                self._jobs[rank] = asyncio.get_running_loop().create_task(self._work(rank))

    async def _poll(self, number: int) -> tuple[int, int, list[Event]]:
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        if ("closed",) in events:
            return number + 1, 0, [("closed",)]
        output = sum(len(event[-1]) for event in events if event[0] == "output")
        return number + 1, output, list(packed(events))

    async def _ask(self, what: str, *arguments: Any) -> Any:
        if what == "received":  # the question whether it lives
            return 0
        if what == "signals":
            for rank, signum in arguments[0]:
                self._cancel(rank, signum == signal.SIGKILL)
        elif what == "close":
            for rank in self.ranks:
                self._cancel(rank)
            if self._jobs:
                _, late = await asyncio.wait(list(self._jobs.values()), timeout=max(arguments[0], 1.0))
                for rank in [rank for rank, job in self._jobs.items() if job in late]:
                    self._cancel(rank, force=True)
            self._reset(())
            self._events.put_nowait(("closed",))
        return None

    def _cancel(self, rank: int, force: bool = False) -> None:
        """Interrupt a worker; `force` ends the Ray process in which it works."""
        import ray

        self._waiting[rank].clear()
        if rank in self._running:
            ray.cancel(self._running[rank], force=force)

    async def _work(self, rank: int) -> None:
        """Run the waiting chunks of a worker, one task after another."""
        try:
            while self._waiting[rank]:
                async for event in self._done(rank, self._waiting[rank].popleft()):
                    self._events.put_nowait(_of_worker(rank, event))
                    if event[0] == "exit":
                        self._waiting[rank].clear()
        finally:
            self._running.pop(rank, None)
            self._jobs.pop(rank, None)

    async def _done(self, rank: int, items: Message) -> AsyncIterator[Event]:
        """Yield the events of a chunk while a task works on it."""
        import ray

        ended = False
        try:
            task = self._running[rank] = self._task.remote(*self._about, self._begun[rank], items)
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

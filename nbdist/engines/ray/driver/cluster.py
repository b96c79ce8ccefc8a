"""The connection to a Ray cluster: resources for the ranks, a process on each of their nodes, and equal versions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

from .... import __version__
from ....system.segments import Segment
from ..options import STRATEGIES, RayOptions, placed_together, resources_of
from . import sent
from .connecting import Refused, connect

#: Packages that have to be the same in the notebook and on the nodes, since what travels depends on them.
PACKAGES = ("torch", "cloudpickle", "ray")
#: Seconds that a node, or the head of the cluster, may not answer.
PATIENCE = 15.0
#: Seconds that Ray may take to reserve what is free: for all ranks, when it has just taken notice that a node is lost
#: and that its ranks have given back the rest; and then for fewer of them.
SETTLE, RESERVE = 5.0, 2.0


class Link:
    """A node: its agent, its ranks, the messages to send to it, and the data that it has."""

    def __init__(self, number: int, host: Any, first: int, count: int) -> None:
        self.number, self.host, self.first, self.count = number, host, first, count
        self.outbox: list[tuple[bytes, Any]] = []
        self.filled = asyncio.Event()
        self.has: set[str] = set()
        self.coming: dict[str, asyncio.Task[None]] = {}
        self.incoming: dict[str, Segment] = {}
        self.lost = ""
        self.gpus: list[str] = []
        self.name = f"node {number}"
        self.node_id = ""
        """Ray's id of the node, as Ray's messages about nodes have it."""

    def forget(self) -> None:
        """Reset the state for the next ranks."""
        self.outbox = []
        self.filled.clear()
        self.has.clear()
        self.coming.clear()
        for segment in self.incoming.values():
            segment.close()
        self.incoming.clear()

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the agent. A call whose connection failed is repeated, unless Ray reports the agent's death."""
        import ray

        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                # A client's references, for ray:// addresses, cannot be awaited themselves.
                return await asyncio.wrap_future(getattr(self.host, method).remote(*arguments).future())
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)


def versions(same: Sequence[str]) -> dict[str, str]:
    """Return the versions that the nodes must have: the same as on this machine. Raises `Refused`."""
    here = {"Python": platform.python_version(), "nbdist": __version__}
    try:
        return here | {name: importlib.metadata.version(name) for name in (*PACKAGES, *same)}
    except importlib.metadata.PackageNotFoundError as exc:
        raise Refused(f"RayOptions(same=...) names {exc.name!r}, which is not installed here") from exc


def refusal(differences: str) -> str:
    """Return the error text for versions that differ."""
    return (
        f"the notebook and the cluster's nodes differ: {differences}. Install the same there (an "
        f"image, or RayOptions(runtime_env={{'pip': [...]}})), or here"
    )


def shortage(options: RayOptions, count: int) -> str:
    """Return the wanted and the free amount of each resource for a number of ranks, the scarcest first."""
    import ray

    wanted = {name: amount * count for name, amount in resources_of(options).items()}
    total, free = ray.cluster_resources(), ray.available_resources()
    rows = []
    for name in sorted(wanted, key=lambda name: free.get(name, 0.0) / wanted[name]):
        rows.append(f"{name}: {wanted[name]:g} wanted, {free.get(name, 0.0):g} free of {total.get(name, 0.0):g}")
    nodes = sum(node["Alive"] for node in ray.nodes())
    text = f"{'; '.join(rows)}; {nodes} node{'s' if nodes != 1 else ''}, placement {options.placement!r}"
    return f"{text}, labels {dict(options.labels)!r}" if options.labels else text


def most_by_sums(options: RayOptions) -> int:
    """Return the number of ranks for which the sums of the nodes' free resources are enough."""
    import ray

    free = ray.available_resources()
    most = min(int(free.get(name, 0.0) / amount + 1e-6) for name, amount in resources_of(options).items())
    if options.placement == "strict_spread":
        most = min(most, options.ranks_per_node * sum(node["Alive"] for node in ray.nodes()))
    return most


def wait_for_room(there_is: Callable[[], bool], options: RayOptions, count: int, say: Callable[[str], None]) -> None:
    """Wait until the cluster has room for a number of ranks. `there_is` waits at most a second, and returns whether
    there is room. Raises `Refused`.
    """
    begin = time.monotonic()
    notice_at = begin + 3.0
    while not there_is():
        now = time.monotonic()
        if now - begin > options.wait:
            raise Refused(
                f"the cluster had no room for {count} rank{'s' * (count > 1)} for {options.wait:g} s: "
                f"{shortage(options, count)}. Ask for fewer ranks or less for each (RayOptions(cpus=...)), add nodes, "
                f"or wait longer (RayOptions(wait=...))"
            )
        if now >= notice_at:
            waited = f"waiting for room for {count} rank{'s' * (count > 1)} ({now - begin:.0f} s)"
            say(f"{waited}: {shortage(options, count)}")
            notice_at = now + 10.0


def host_class() -> Any:
    """Return the class of the actors that hold the agents, in the form that Ray takes."""
    import ray

    sent.by_value()
    groups = {"poll": "poll", "deliver": "deliver", "store": "deliver", "ask": "ask", "draining": "ask"}
    for name, group in groups.items():
        setattr(sent.Host, name, ray.method(concurrency_group=group)(getattr(sent.Host, name)))
    remote: Any = ray.remote  # which takes more than it says to type checkers
    return remote(concurrency_groups={"poll": 1, "deliver": 1, "ask": 4}, num_cpus=0, max_restarts=0)(sent.Host)


class Cluster:
    """The connection to Ray, the reserved resources, and an agent's process on each node."""

    def __init__(
        self, options: RayOptions, world_size: int, say: Callable[[str], None], least: int | None = None
    ) -> None:
        self._options = options
        self._group: Any = None
        self._counts: list[int] = []
        self.takes_folder = "working_dir" not in options.runtime_env
        """True if ranks work in the notebook's folder, if the node has this folder."""
        connect(options, say)
        self._reserve(world_size, world_size if least is None else least, say)
        self.links: list[Link] = []
        self._start_hosts()
        self._check_versions()

    def _reserve(self, world_size: int, least: int, say: Callable[[str], None]) -> None:
        if least == world_size:
            self._ask(world_size)
            wait_for_room(lambda: bool(self._group.wait(1)), self._options, world_size, say)
        else:
            wait_for_room(lambda: self._take_what_is_free(world_size, least), self._options, least, say)

    def _ask(self, ranks: int) -> None:
        """Request resources for a number of ranks from Ray, in place of an earlier request."""
        from ray.util import placement_group

        self._give_back()
        options, self._counts = self._options, placed_together(self._options, ranks)
        self._group = placement_group(
            [resources_of(options, count) for count in self._counts],
            strategy=STRATEGIES[options.placement],
            bundle_label_selector=[dict(options.labels)] * len(self._counts) if options.labels else None,
        )

    def _give_back(self) -> None:
        from ray.util import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _take_what_is_free(self, world_size: int, least: int) -> bool:
        """Reserve resources for all ranks, or for as many as possible; return whether they are enough for `least`.

        The number that fits depends on more than sums (nodes, placement, labels), so Ray is asked: first for the number
        that the sums allow, then for half as many, and so on.
        """

        def fit(ranks: int, seconds: float) -> bool:
            self._ask(ranks)
            return bool(self._group.wait(seconds))

        if fit(world_size, SETTLE):
            return True
        self._give_back()  # it keeps nothing from the next ones
        found, low, high = 0, least, min(world_size - 1, most_by_sums(self._options))
        ranks = high
        while low <= high:
            if fit(ranks, RESERVE):
                found, low = ranks, ranks + 1
            else:
                high = ranks - 1
            ranks = (low + high + 1) // 2
        return bool(found) and (sum(self._counts) == found or fit(found, SETTLE))

    def _start_hosts(self) -> None:
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def at(bundle: int) -> Any:
            return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

        where = placement_group_table(self._group)["bundles_to_node_id"]
        bundles: dict[str, list[int]] = {}
        for bundle in sorted(where):
            bundles.setdefault(where[bundle], []).append(bundle)
        host, first = host_class(), 0
        for number, own in enumerate(bundles.values()):
            handle, count = host.options(scheduling_strategy=at(own[0])).remote(), sum(self._counts[b] for b in own)
            self.links.append(Link(number, handle, first, count))
            first += count
        gpus = iter(self._gpu_ids([(at(b), self._counts[b]) for own in bundles.values() for b in own]))
        for link in self.links:
            link.gpus = list(itertools.islice(gpus, link.count))

    def _gpu_ids(self, places: Sequence[tuple[Any, int]]) -> list[str]:
        """Return the GPUs that Ray has reserved with the `bundles`: a task in each bundle reads them, all at once."""
        import ray

        if not self._options.gpus:
            return []

        def own() -> list[str]:
            import ray

            return [str(number) for number in ray.get_gpu_ids()]

        task = ray.remote(num_cpus=0)(own)
        asked = [task.options(scheduling_strategy=place, num_gpus=count).remote() for place, count in places]
        found = ray.get(asked)
        return list(itertools.chain.from_iterable(found))

    def _check_versions(self) -> None:
        import ray

        here = versions(self._options.same)
        try:
            found = ray.get([link.host.differences.remote(here) for link in self.links])
            node_ids = ray.get([link.host.node_id.remote() for link in self.links])
        except ray.exceptions.RayError as exc:
            raise Refused(f"no process could be started on a node: {exc}") from exc
        for link, node_id in zip(self.links, node_ids, strict=True):
            link.node_id = node_id
        lines = [f"node {link.number}: {text}" for link, text in zip(self.links, found, strict=True) if text]
        if lines:
            raise Refused(refusal(" | ".join(lines)))

    def close(self) -> None:
        """Give all resources back."""
        import ray

        for link in self.links:
            ray.kill(link.host)
        self._give_back()
        ray.shutdown()

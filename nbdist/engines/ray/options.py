"""`RayOptions`: the cluster, and the resources of ranks on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...checks import check_choice, check_count, check_mapping, check_number, shown
from ...errors import entry_class

#: Ray's names of the placements.
STRATEGIES = {
    "pack": "PACK",
    "spread": "SPREAD",
    "strict_pack": "STRICT_PACK",
    "strict_spread": "STRICT_SPREAD",
}


@entry_class("RayOptions")
@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """A Ray cluster, and the resources that the ranks get of it.

    Raises:
        ValueError, TypeError: For options that make no sense.

    Examples:
        >>> RayOptions(address="ray://head:10001", gpus=1, placement="spread").placement
        'spread'
    """

    engine: ClassVar[str] = "ray"

    address: str | None = None
    """`auto`: the cluster that runs on this machine, or that RAY_ADDRESS names. `ray://host:10001`: one elsewhere.
    `host:6379`: one whose node this machine is. None: a Ray of this machine alone, started at need."""
    cpus: float = 1.0
    """CPUs for each rank, and so its threads."""
    gpus: int = 0
    """1: a GPU for each rank. 0: the ranks work on CPUs."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further resources that Ray reserves for each rank, such as `{"memory": 8e9}` or a resource of one's own."""
    placement: str = "pack"
    """`pack`: on as few nodes as possible. `spread`: on as many. `strict_pack`: all on one node. `strict_spread`: each
    on another."""
    ranks_per_node: int = 1
    """The number of ranks that are placed together, and found room for at once, which a cluster of many equal nodes
    does sooner. With `strict_spread` they have a node to themselves."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Only nodes with these labels, as Ray selects them: `{"ray.io/accelerator-type": "H100"}`."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment, made ready on the nodes: `{"working_dir": ".", "pip": ["polars"]}`."""
    same: Sequence[str] = ()
    """Further packages whose versions have to be the notebook's, in addition to torch, nbdist, cloudpickle and Ray."""
    wait: float = 120.0
    """Seconds that the cluster may take to have room."""
    linger: float = 60.0
    """Seconds for which the room, and the warm processes there, are kept after a call, for the next one."""

    def __post_init__(self) -> None:
        if self.address is not None and not isinstance(self.address, str):
            raise TypeError(f"address must be a string such as 'ray://host:10001', or None, got {shown(self.address)}")
        check_choice(self.placement, STRATEGIES, name="placement")
        if self.gpus not in (0, 1) or isinstance(self.gpus, bool):
            raise ValueError(f"gpus must be 0, or 1 for each rank, got {self.gpus!r}: a rank works with one GPU")
        check_count(self.ranks_per_node, least=1, name="ranks_per_node")
        for name in ("cpus", "wait", "linger"):
            check_number(getattr(self, name), least=0, name=name)
        check_mapping(self.resources, name="resources", of="names of resources to amounts")
        for name, amount in self.resources.items():
            check_number(amount, least=0, name=f"resources[{name!r}]")
        check_mapping(self.labels, name="labels", of="names of labels to values")
        check_mapping(self.runtime_env, name="runtime_env", of="names to what Ray makes ready")
        if isinstance(self.same, str) or not all(isinstance(name, str) for name in self.same):
            raise TypeError(f"same must be a list of names of packages, got {shown(self.same)}")
        if not resources_of(self):
            raise ValueError(
                "cpus must be above 0 if no other resources are asked for, got 0: Ray cannot place such ranks"
            )


def resources_of(options: RayOptions, ranks: int = 1) -> dict[str, float]:
    """Return the resources to reserve for a number of ranks, by Ray's names."""
    wanted = {"CPU": options.cpus, "GPU": float(options.gpus), **options.resources}
    return {name: amount * ranks for name, amount in wanted.items() if amount}


def placed_together(options: RayOptions, world_size: int) -> list[int]:
    """Return the number of ranks that are placed together, for each place; the last place gets the remainder."""
    full, rest = divmod(world_size, options.ranks_per_node)
    return [options.ranks_per_node] * full + [rest] * bool(rest)

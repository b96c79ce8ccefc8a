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
    """The address of a Ray cluster, and the resources of each rank there.

    Raises:
        ValueError, TypeError: An option is invalid.

    Examples:
        >>> RayOptions(address="ray://head:10001", gpus=1, placement="spread").placement
        'spread'
    """

    engine: ClassVar[str] = "ray"

    address: str | None = None
    """`auto`: the cluster that runs on this machine, or that RAY_ADDRESS names. `ray://host:10001`: a cluster
    elsewhere. `host:6379`: a cluster that has this machine as a node. None: a Ray on this machine alone, which is
    started if necessary."""
    cpus: float = 1.0
    """The number of CPUs for each rank, and so of its threads."""
    gpus: int = 0
    """The number of GPUs for each rank: 1, or 0 for ranks on CPUs."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further resources that Ray reserves for each rank, such as `{"memory": 8e9}` or a custom resource."""
    placement: str = "pack"
    """`pack`: on as few nodes as possible. `spread`: on as many as possible. `strict_pack`: all on one node.
    `strict_spread`: each rank on a node of its own."""
    ranks_per_node: int = 1
    """The number of ranks in a group that Ray places together on one node. On a cluster of many equal nodes, groups are
    placed sooner than single ranks. With `strict_spread`, each group has a node of its own."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of the nodes that may be used, as Ray selects nodes: `{"ray.io/accelerator-type": "H100"}`."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment, which is prepared on the nodes: `{"working_dir": ".", "pip": ["polars"]}`."""
    same: Sequence[str] = ()
    """Further packages whose versions must be the same as the notebook's, in addition to torch, nbdist, cloudpickle and
    Ray."""
    wait: float = 120.0
    """The number of seconds to wait until the cluster has room."""
    linger: float = 60.0
    """The number of seconds after a call for which the resources, and the warm processes on them, are kept for the next
    call."""

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
    """Return the number of ranks that are placed together, for each group. The last group gets the remainder."""
    full, rest = divmod(world_size, options.ranks_per_node)
    return [options.ranks_per_node] * full + [rest] * bool(rest)

"""A cluster of several Ray nodes on this machine, for trials and tests of multi-node code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray.cluster_utils import Cluster

from ..kernel.driver_process import release
from .starting import agent_ports, announced, environment, patiently
from .stopping import family, kill


class LocalCluster(Cluster):
    """Ray's `Cluster` of nodes on this machine, with a start that works on a busy machine, and an end that leaves no
    process.

    Args:
        nodes: The number of nodes to start with.
        head: Parameters of the head node alone.
        **options: Parameters of each node (`ray._private.parameter.RayParams`), such as `num_cpus`.

    Raises an error of Ray if a node does not start.
    """

    def __init__(self, nodes: int = 2, head: Mapping[str, Any] | None = None, **options: Any) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        super().__init__()
        self._options = {"object_store_memory": 200 << 20, "include_dashboard": False, "no_monitor": True, **options}
        self.add_node(**(head or {}))
        for _ in range(nodes - 1):
            self.add_node()

    def add_node(self, wait: bool = True, **options: Any) -> Any:
        """Start one more node. `options` are its own parameters. Returns Ray's object for the node."""
        ports = agent_ports()
        before = dict(os.environ)
        os.environ.update(environment(before))
        try:
            with announced(ports):
                return patiently(
                    lambda: super(LocalCluster, self).add_node(wait, **ports, **{**self._options, **options})
                )
        finally:
            os.environ.clear()
            os.environ.update(before)

    def shutdown(self) -> None:
        """End the nodes, all that they have started, and the driver that nbdist keeps for the next call."""
        release()
        nodes: Any = self.list_all_nodes()  # type: ignore[no-untyped-call]
        processes = family(node.all_processes["raylet"][0].process.pid for node in nodes)
        super().shutdown()  # type: ignore[no-untyped-call]
        kill(processes)

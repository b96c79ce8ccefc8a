"""A plan by TorchRec's planner, for tables and their requested strategies; or the reason why there is none."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import comm
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Stats, Topology
from torchrec.distributed.types import ShardingPlan

from ...checks import shown
from .bandwidth import Bandwidth, measure
from .plan import Plan, Shard
from .strategies import STRATEGIES, Table, by_table, column_parts, refusal, too_large_to_copy

#: Part of the free memory that a plan leaves for activations, for what is sent, and for what allocators lose. TorchRec
#: takes as much.
RESERVE = 0.15
#: Of TorchRec's ways to hold a table those in the device's own memory. The others take the host's for a GPU, without
#: a word where the GPU's does not do, and each lookup goes through the bus: only for tables that ask for it.
_KERNELS = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]


_CPU_KERNELS = [EmbeddingComputeKernel.FUSED.value]
_GPU_KERNELS = [
    *_CPU_KERNELS,
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
]


def make_sharders(fused: dict[str, Any]) -> list[Any]:
    class Bags(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(STRATEGIES)  # TorchRec offers those with rows on GPUs only

    return [Bags(fused_params=fused), EmbeddingCollectionSharder(fused_params=fused)]


@dataclass(frozen=True)
class Planner:
    """A planner for the tables of a model, in a rank."""

    model: nn.Module
    tables: Mapping[str, Table]
    chosen: Mapping[str, str]
    """The strategy of each table, except tables that are left to TorchRec."""
    sharders: list[Any]
    optimizers: Mapping[str, str]
    """The optimizer of each table."""
    batch_size: int
    memory: int | None
    """The number of bytes per rank. None: the free memory, minus a reserve."""
    device: torch.device
    group: Any
    """The process group that exchanges the rows. None: the default process group."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """The compute kernel of each table, except tables in the device's memory."""
    topology: Topology | None = None
    """The topology that the user gives. None: it is measured."""

    def plan(self) -> tuple[ShardingPlan, Plan]:
        """Make a plan for TorchRec, and one for the user, on rank 0; all ranks get both plans, or the exception."""
        nranks, local = dist.get_world_size(), comm.get_local_size()
        constraints = {table.name: self._constrain(table, nranks, local) for table in self.tables.values()}
        topology, memory, left = self.topology, self.memory, ""
        if topology is not None:
            memory = min(_bytes(one.storage) if one.storage.hbm == 0 else one.storage.hbm for one in topology.devices)
        elif memory is None:
            free, rank = _least_free(self.device, local)
            memory = max(0, int(free * (1 - RESERVE)) - self._dense_bytes())
            left = f" ({free:,} are free on rank {rank}; the rest is for dense layers, activations and what is sent)"
        if topology is None:
            topology = _topology(self.device.type, nranks, local, measure(self.device, self.group), memory)
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                outcome = [self._plan_here(constraints, topology, memory, left)]
            except ValueError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if isinstance(outcome[0], ValueError):
            raise outcome[0]
        result: tuple[ShardingPlan, Plan] = outcome[0]
        return result

    def _constrain(self, table: Table, nranks: int, local: int) -> ParameterConstraints:
        why = {
            strategy: refusal(strategy, table, self.optimizers[table.name], nranks, local, self.device.type)
            for strategy in STRATEGIES
        }
        strategy = self.chosen.get(table.name)
        if strategy and why[strategy]:
            raise ValueError(f"table {table.name!r} cannot be {strategy} on {nranks} ranks: {why[strategy]}")
        # Left to itself the planner takes no grid: TorchRec's own rule.
        others = [one for one in STRATEGIES if not why[one] and one != "grid_shard"]
        if too_large_to_copy(table, nranks * self.batch_size) and len(others) > 1:
            others = [one for one in others if one != "data_parallel"]
        possible = [strategy] if strategy else others
        if not possible:
            raise ValueError(f"table {table.name!r} cannot be sharded: {why['table_wise']}")
        columns, features = table.config.embedding_dim, list(table.config.feature_names)
        parts = column_parts(strategy or "column_wise", nranks, local)
        return ParameterConstraints(
            sharding_types=possible,
            compute_kernels=[self.kernels[table.name]] if table.name in self.kernels else _KERNELS,
            min_partition=columns // parts if columns % (4 * parts) == 0 else columns,
            pooling_factors=[1.0] * len(features),
            feature_names=features,
        )

    def _plan_here(
        self,
        constraints: dict[str, ParameterConstraints],
        topology: Topology,
        memory: int,
        left: str,
    ) -> tuple[ShardingPlan, Plan]:
        """Plan for ranks that may use `memory` bytes each. `left` is a text for the error about the free bytes that
        the plan may not use.
        """
        nranks, chosen = topology.world_size, _Chosen()
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=self.batch_size,
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=[chosen],
        )
        try:
            plan = planner.plan(self.model, self.sharders)
        except PlannerError as error:
            space = planner._enumerator.enumerate(self.model, self.sharders)
            least = {  # table → bytes of its largest shard, sharded in the way that needs least on one rank
                name: min(max(_bytes(shard.storage) for shard in o.shards) for o in space if o.name == name)
                for name in self.tables
            }
            largest = max(least, key=lambda name: least[name])
            ways = ", ".join(constraints[largest].sharding_types)
            raise ValueError(
                f"the tables do not fit on {nranks} ranks with {memory:,} bytes each{left}. The largest is table "
                f"{largest!r} ({ways}), which needs {least[largest]:,} bytes on one rank for weights, optimizer state "
                "and batches. Use more ranks, a strategy that splits the table, or more memory_bytes=. TorchRec says: "
                f"{str(error).splitlines()[0]}"
            ) from None
        return plan, self._to_look_at(chosen.options, nranks)

    def _dense_bytes(self) -> int:
        """Return the bytes of all parameters outside tables: values, gradients, and two moments of an optimizer."""
        tables = {id(table.weight) for table in self.tables.values()}
        dense = [parameter for parameter in self.model.parameters() if id(parameter) not in tables]
        return 4 * sum(parameter.numel() * parameter.element_size() for parameter in dense)

    def _to_look_at(self, options: list[Any], nranks: int) -> Plan:
        shards = [
            Shard(
                table=option.name,
                strategy=option.sharding_type,
                rank=part.rank,
                row=part.offset[0],
                rows=part.size[0],
                column=part.offset[1],
                columns=part.size[1],
                bytes=part.size[0] * part.size[1] * self.tables[option.name].weight.element_size(),
                memory=_bytes(part.storage),
                work=part.perf.total,
            )
            for option in options
            for part in option.shards
        ]
        order = list(self.tables)
        shards.sort(key=lambda s: (order.index(s.table), s.rank, s.row, s.column))
        return Plan(tuple(shards), nranks)


def choose_kernels(
    given: Mapping[str, str], tables: Mapping[str, Table], device: torch.device, fused: bool | None
) -> dict[str, str]:
    """Return the compute kernel of each table that `given` matches.

    Raises:
        ValueError: This device has no such kernel, or tables are not fused.
    """
    possible = _CPU_KERNELS if device.type == "cpu" else _GPU_KERNELS
    for pattern, kernel in given.items():
        if kernel not in possible:
            raise ValueError(
                f"`compute_kernels[{pattern!r}]` must be one of {', '.join(possible)} on a {device.type} rank, got "
                f"{kernel!r}"
            )
    if given and fused is False:
        raise ValueError("`compute_kernels` must be None with fused=False: the kernels are of fused tables")
    return by_table(given, tables)


def check_topology(topology: Any, memory: int | None, device: torch.device) -> None:
    """Raise an error unless a topology is None, or describes these ranks."""
    if topology is None:
        return
    if not isinstance(topology, Topology):
        raise TypeError(f"`topology` must be a torchrec.distributed.planner.Topology, got {shown(topology)}")
    if memory is not None:
        raise ValueError(
            "`memory_bytes` must be None with `topology`, which has the memory of each rank: give one of the two"
        )
    found, here = (topology.world_size, topology.compute_device), (dist.get_world_size(), device.type)
    if found != here:
        raise ValueError(f"`topology` must be of {here[0]} {here[1]} ranks, got one of {found[0]} {found[1]} ranks")


def _least_free(device: torch.device, local: int) -> tuple[int, int]:
    """Return the smallest number of free bytes that a rank may use, and the rank that has it.

    All ranks must call it. Ranks that share a GPU divide its memory, and so do the `local` CPU ranks of a machine.
    """
    if device.type == "cuda":
        # What the allocator holds back for later, of earlier calls and of measurements, is to be had as well.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", dist.get_rank())
        mine = torch.cuda.mem_get_info(device)[0] + cached, str(uuid)
    else:
        mine = psutil.virtual_memory().available // local, str(dist.get_rank())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    sharing = Counter(where for _, where in everyone)
    return min((free // sharing[where], rank) for rank, (free, where) in enumerate(everyone))


class _Chosen(Stats):
    """The recorder of the sharding options that a planner chose. TorchRec has callbacks for this only from 1.1 on."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def log(self, *args: Any, best_plan: list[Any], **more: Any) -> None:
        self.options = best_plan


def _topology(device: str, nranks: int, local: int, bandwidth: Bandwidth, memory: int) -> Topology:
    """Describe the machines to TorchRec, with bandwidths in its unit, bytes per millisecond."""
    options: dict[str, Any] = {"inter_host_bw": bandwidth.ranks / 1e3}
    if nranks == local:  # it reckons that what all ranks add up goes over one network a rank
        options = {"intra_host_bw": bandwidth.ranks / 1e3, "inter_host_bw": bandwidth.ranks / 1e3 / local}
    kind = "hbm" if device == "cuda" else "ddr"
    options |= {f"{kind}_mem_bw": bandwidth.memory / 1e3, f"{kind}_cap": max(1, memory)}  # 0: TorchRec's own number
    if "created_by_factory" in inspect.signature(Topology).parameters:  # from 1.7 on, which warns of other topologies
        options["created_by_factory"] = True
    return Topology(world_size=nranks, compute_device=device, local_world_size=local, **options)


def _bytes(storage: Any) -> int:
    return int(storage.hbm + storage.ddr)

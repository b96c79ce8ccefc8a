"""How tables are to be sharded: which kinds can be, what TorchRec's planner makes of it, and why not."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from .plan import Plan, Shard
from .versions import check_torchrec

check_torchrec()

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingCollection  # noqa: E402
from torchrec.distributed import comm  # noqa: E402
from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner  # noqa: E402
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation  # noqa: E402
from torchrec.distributed.planner.types import (  # noqa: E402
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.optim import RowWiseAdagrad  # noqa: E402

KINDS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
_SEQUENCE_KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")  # what TorchRec has without pooling
ROW_KINDS = ("row_wise", "table_row_wise", "grid_shard")

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
    "lars_sgd": EmbOptimType.LARS_SGD,
}
# The fused ones that FBGEMM has for CPUs. They leave alone the rows that a batch does not touch, and so do their dense
# counterparts, given to the tables that every rank has a copy of; Adam and the others would move those rows.
EVERYWHERE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, lr, eps: torch.optim.SGD(params, lr=lr),
    "adagrad": lambda params, lr, eps: torch.optim.Adagrad(params, lr=lr, eps=eps),
    "rowwise_adagrad": lambda params, lr, eps: RowWiseAdagrad(params, lr=lr, eps=eps),
}


@dataclass(frozen=True)
class Table:
    """An embedding table of the model as it was before sharding."""

    name: str
    key: str
    """Of its weights in the model's state dict."""
    config: Any
    weight: torch.Tensor
    pooled: bool


def check_optimizer(optimizer: str, device: torch.device) -> None:
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: one of {', '.join(OPTIMIZERS)}")
    if device.type == "cpu" and optimizer not in EVERYWHERE:
        raise ValueError(
            f"optimizer={optimizer!r}: FBGEMM has no fused {optimizer} for CPU ranks; it has {', '.join(EVERYWHERE)}"
        )


def find_tables(model: nn.Module) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for path, module in model.named_modules():
        pooled = isinstance(module, EmbeddingBagCollection)
        if not pooled and not isinstance(module, EmbeddingCollection):
            continue
        attribute = "embedding_bags" if pooled else "embeddings"
        for config in module.embedding_bag_configs() if pooled else module.embedding_configs():
            if config.name in found:
                raise ValueError(f"two tables are called {config.name!r}: give each a name of its own")
            weight = getattr(module, attribute)[config.name].weight
            key = f"{path}.{attribute}.{config.name}.weight".lstrip(".")
            found[config.name] = Table(config.name, key, config, weight, pooled)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection: nothing to shard"
        )
    return found


def choose(kinds: Mapping[str, str], tables: Mapping[str, Table]) -> dict[str, str]:
    """Table → kind, of the tables that `kinds` says something about."""
    for pattern, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"{pattern!r}: {kind!r} is no kind of sharding; there are {', '.join(KINDS)}")
        if not fnmatch.filter(tables, pattern) and pattern not in tables:
            raise ValueError(f"{pattern!r} matches no table; there are {', '.join(tables)}")
    chosen = {}
    for name in tables:
        for pattern, kind in sorted(kinds.items(), key=lambda item: item[0] != name):
            if pattern == name or fnmatch.fnmatchcase(name, pattern):
                chosen[name] = kind
                break
    return chosen


def column_parts(kind: str, nranks: int, local: int) -> int:
    """In how many parts of equal width a kind splits a table's columns.

    Args:
        kind: One of `KINDS`.
        nranks: World size.
        local: Ranks on this machine.
    """
    # A grid has a block of columns per machine, and is one on a single machine too.
    return {"column_wise": nranks, "table_column_wise": local, "grid_shard": max(2, nranks // local)}.get(kind, 1)


def refusal(
    kind: str, rows: int, columns: int, pooled: bool, optimizer: str, nranks: int, local: int, device: str
) -> str:
    """Why a table cannot be sharded in this way; empty if it can."""
    if not pooled and kind not in _SEQUENCE_KINDS:
        return f"TorchRec shards the tables of an EmbeddingCollection only {', '.join(_SEQUENCE_KINDS)}"
    if kind == "data_parallel":
        if not pooled and device == "cpu":
            return "FBGEMM's lookup for copies of a table always pools on CPUs, and an EmbeddingCollection must not be"
        if optimizer not in EVERYWHERE:
            return f"copies of a table on every rank train with {', '.join(EVERYWHERE)} only, not with {optimizer}"
        return ""
    ranks = {"row_wise": nranks, "table_row_wise": local, "grid_shard": local}.get(kind, 1)
    filled = math.ceil(rows / math.ceil(rows / ranks))
    if filled < ranks:
        return f"TorchRec gives {rows} rows to {filled} of {ranks} ranks, and FBGEMM cannot hold a part without rows"
    parts = column_parts(kind, nranks, local)
    if columns % (4 * parts):
        width = f"{columns} columns in {parts} parts" if parts > 1 else f"{columns} columns"
        return f"{width}: FBGEMM needs a multiple of 4 in each, so the table has to have a multiple of {4 * parts}"
    return ""


def make_sharders(fused: dict[str, Any]) -> list[Any]:
    class Bags(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(KINDS)  # TorchRec offers those with rows on GPUs only

    return [Bags(fused_params=fused), EmbeddingCollectionSharder(fused_params=fused)]


def make_plan(
    model: nn.Module,
    tables: Mapping[str, Table],
    chosen: Mapping[str, str],
    sharders: list[Any],
    optimizer: str,
    batch_size: int,
    memory: int | None,
    device: torch.device,
) -> tuple[ShardingPlan, Plan]:
    """The plan for TorchRec and the one to look at: made on rank 0, the same, or the same exception, on all ranks."""
    nranks, local = dist.get_world_size(), comm.get_local_size()
    constraints = {}
    for table in tables.values():
        rows, columns = table.config.num_embeddings, table.config.embedding_dim
        why = {
            kind: refusal(kind, rows, columns, table.pooled, optimizer, nranks, local, device.type) for kind in KINDS
        }
        kind = chosen.get(table.name)
        if kind and why[kind]:
            raise ValueError(f"table {table.name!r} cannot be {kind} on {nranks} ranks: {why[kind]}")
        # Left to itself the planner takes no grid: TorchRec's own rule.
        possible = [kind] if kind else [kind for kind in KINDS if not why[kind] and kind != "grid_shard"]
        if not possible:
            raise ValueError(f"table {table.name!r} cannot be sharded: {why['table_wise']}")
        parts = column_parts(kind or "column_wise", nranks, local)
        constraints[table.name] = ParameterConstraints(
            sharding_types=possible,
            min_partition=columns // parts if columns % (4 * parts) == 0 else columns,
            pooling_factors=[1.0] * len(table.config.feature_names),
            feature_names=list(table.config.feature_names),
        )
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [_plan_here(model, tables, constraints, sharders, batch_size, memory, device, nranks, local)]
        except ValueError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0, device=device)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    result: tuple[ShardingPlan, Plan] = outcome[0]
    return result


def _plan_here(
    model: nn.Module,
    tables: Mapping[str, Table],
    constraints: dict[str, Any],
    sharders: list[Any],
    batch_size: int,
    memory: int | None,
    device: torch.device,
    nranks: int,
    local: int,
) -> tuple[ShardingPlan, Plan]:
    on_gpu = device.type == "cuda"
    if memory is None:
        memory = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available // local
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=nranks, local_world_size=local, **{f"{'hbm' if on_gpu else 'ddr'}_cap_bytes": memory}),
        HardwareConfig(),
        KernelConfig(compute_device=device.type),
    )
    best: list[Any] = []

    def note(options: list[Any]) -> list[Any]:
        best.extend(options)
        return options

    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[],
        callbacks=[note],
    )
    try:
        plan = planner.plan(model, sharders)
    except PlannerError as error:
        space = planner._enumerator.enumerate(model, sharders)
        least = {  # table → bytes of its largest shard, sharded in the way that needs least on one rank
            name: min(max(_bytes(shard.storage) for shard in o.shards) for o in space if o.name == name)
            for name in tables
        }
        largest = max(least, key=lambda name: least[name])
        ways = ", ".join(constraints[largest].sharding_types)
        raise ValueError(
            f"the tables do not fit on {nranks} ranks with {memory:,} bytes each. The largest need is that of table "
            f"{largest!r} ({ways}): {least[largest]:,} bytes on one rank, weights, optimizer state and batches. Take "
            f"more ranks, a kind that splits the table, or more memory=. TorchRec says: {str(error).splitlines()[0]}"
        ) from None
    shards = [
        Shard(
            table=option.name,
            kind=option.sharding_type,
            rank=part.rank,
            row=part.offset[0],
            rows=part.size[0],
            column=part.offset[1],
            columns=part.size[1],
            bytes=part.size[0] * part.size[1] * tables[option.name].weight.element_size(),
            memory=_bytes(part.storage),
            work=part.perf.total,
        )
        for option in best
        for part in option.shards
    ]
    order = list(tables)
    shards.sort(key=lambda s: (order.index(s.table), s.rank, s.row, s.column))
    return plan, Plan(tuple(shards), nranks)


def _bytes(storage: Any) -> int:
    return int(storage.hbm + storage.ddr)

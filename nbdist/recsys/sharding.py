"""Embedding tables sharded over the ranks, with TorchRec: plan, build, train, save, and get one plain model back.

Inside a rank::

    from nbdist.recsys.sharding import shard

    def train():
        sharded = shard(Model(), {"users": "row_wise", "small_*": "data_parallel"}, batch_size=512)
        for batch in equal_steps(loader()):
            sharded.optimizer.zero_grad()
            loss(sharded.model(batch.features), batch.labels).backward()
            sharded.optimizer.step()
        return sharded.plan, sharded.gather()

`KINDS` are TorchRec's: a table whole on one rank (table_wise), split by rows (row_wise; table_row_wise: over the
ranks of one machine), by columns (column_wise; table_column_wise), by both (grid_shard), or a copy on every rank
(data_parallel). TorchRec itself offers no kind with rows on CPUs; here all work on CPU ranks (gloo) as on GPUs.

The gradient of a step is the mean of the ranks' gradients, as in DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from .plan import Plan, Shard
from .uneven import equal_steps
from .versions import check_torchrec

check_torchrec()

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingCollection  # noqa: E402
from torchrec.distributed import DistributedModelParallel, comm  # noqa: E402
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
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402

from .pooling import divide_means, pad_to_largest, restore_order, sum_instead  # noqa: E402

__all__ = ["KINDS", "OPTIMIZERS", "Plan", "Sharded", "equal_steps", "shard"]

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
_ROW_KINDS = ("row_wise", "table_row_wise", "grid_shard")

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
_EVERYWHERE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, lr, eps: torch.optim.SGD(params, lr=lr),
    "adagrad": lambda params, lr, eps: torch.optim.Adagrad(params, lr=lr, eps=eps),
    "rowwise_adagrad": lambda params, lr, eps: RowWiseAdagrad(params, lr=lr, eps=eps),
}

_BLOCK = 2**17
"""Elements of a table that are initialised at a time: what the initialisation takes beside the shards."""


@dataclass(frozen=True)
class _Table:
    """An embedding table of the model as it was before sharding."""

    name: str
    key: str
    """Of its weights in the model's state dict."""
    config: Any
    weight: torch.Tensor
    pooled: bool


@dataclass(frozen=True)
class Sharded:
    """A model whose tables are sharded over the ranks, inside a rank."""

    model: DistributedModelParallel
    """Call it like the model that was sharded. Its other parameters are data parallel."""
    optimizer: CombinedOptimizer
    """`step` it as usual. Tables are updated in the backward pass already; it does the copies of data_parallel tables
    and the model's other parameters, and passes changed learning rates on."""
    plan: Plan
    template: nn.Module
    """The model as it was, its parameters on the meta device."""

    def gather(self) -> nn.Module | None:
        """The whole model as one plain module, on the CPU of rank 0; None on the other ranks.

        All ranks have to call it. Takes the whole model's memory on rank 0.
        """
        from .checkpoint import gather

        return gather(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`. All ranks have to call it."""
        from .checkpoint import save

        save(self, folder)

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Load what `save` wrote, on any number of ranks and with any kinds. All ranks have to call it.

        Args:
            folder: What `save` was given.
            optimizer: Whether to load the optimizer's state too. Learning rates are not part of it.

        Raises:
            ValueError: The checkpoint is of other tables, or the optimizer's state does not fit these kinds.
        """
        from .checkpoint import load

        load(self, folder, optimizer)


def shard(
    model: nn.Module,
    kinds: Mapping[str, str] | None = None,
    *,
    batch_size: int,
    optimizer: str = "rowwise_adagrad",
    lr: float = 0.01,
    eps: float = 1e-8,
    dense_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    memory: int | None = None,
) -> Sharded:
    """Shard the embedding tables of `model` over all ranks. All ranks have to call it, with the same arguments.

    Tables on the meta device are never whole anywhere: each rank makes its own part, with the table's `init_fn`, block
    by block, from seeds drawn from torch's random state. So the initial weights depend neither on the kinds nor on
    the number of ranks. Tables with values keep them.

    rowwise_adagrad keeps one number per row of a shard. A table split by columns has several per row, and so learns a
    little differently from the same table in one piece; sgd and adagrad do not.

    Args:
        model: A module with `EmbeddingBagCollection`s or `EmbeddingCollection`s, or one of those. It is consumed: use
            `Sharded.model` instead.
        kinds: Table name or glob → one of `KINDS`. A name goes before globs, and globs in their order. Tables that
            nothing matches are left to TorchRec's planner.
        batch_size: Samples per rank and step, for the planner's estimates.
        optimizer: One of `OPTIMIZERS`, fused into the tables' backward pass. CPU ranks have sgd, adagrad and
            rowwise_adagrad.
        lr: Learning rate of the tables.
        eps: What is added to the denominator, for those optimizers that have one.
        dense_optimizer: Makes the optimizer of all other parameters, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`. Needed if there are any.
        memory: Bytes per rank that the plan may use. None: what is free, divided by the ranks of this machine.

    Raises:
        ValueError: Before anything is built, for an optimizer, a kind or a size that cannot work; it says why.
        RuntimeError: Outside a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("shard() works in a rank: call it in a function that in_ddp or a Session runs")
    device = _device()
    _check_optimizer(optimizer, device)
    tables = _tables(model)
    chosen = _choose(kinds or {}, tables)
    dense = _dense_parameters(model, tables)
    if dense and dense_optimizer is None:
        raise ValueError(
            f"the model has parameters beside its tables ({', '.join(list(dense)[:3])}, ...): give "
            "dense_optimizer, such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    sharders = _sharders({"optimizer": OPTIMIZERS[optimizer], "learning_rate": lr, "eps": eps})
    template = _template(model)
    with _quiet(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # TorchRec draws as many random numbers as a rank has weights; the ranks are to stay alike.
        torchrec_plan, plan = _plan(model, tables, chosen, sharders, optimizer, batch_size, memory, device)
        seed = _common_seed()
        _materialise(model, device)
        _forget_old_groups()
        hooks = [_hooks(path, module, plan) for path, module in model.named_modules()]
        parallel = DistributedModelParallel(model, device=device, plan=torchrec_plan, sharders=sharders)
        for add in hooks:
            add(parallel.module)
        _fill(parallel, tables, seed)
    _ignore_warnings_in_training()
    optimizers = [parallel.fused_optimizer]
    copies = _unsharded(parallel)
    for mine, make in (
        ({key: p for key, p in copies.items() if key in dense}, dense_optimizer),
        ({key: p for key, p in copies.items() if key not in dense}, lambda some: _EVERYWHERE[optimizer](some, lr, eps)),
    ):
        if mine:
            optimizers.append(KeyedOptimizerWrapper(mine, make))
    return Sharded(parallel, CombinedOptimizer(optimizers), plan, template)


def _device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_optimizer(optimizer: str, device: torch.device) -> None:
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: one of {', '.join(OPTIMIZERS)}")
    if device.type == "cpu" and optimizer not in _EVERYWHERE:
        raise ValueError(
            f"optimizer={optimizer!r}: FBGEMM has no fused {optimizer} for CPU ranks; it has {', '.join(_EVERYWHERE)}"
        )


def _tables(model: nn.Module) -> dict[str, _Table]:
    found: dict[str, _Table] = {}
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
            found[config.name] = _Table(config.name, key, config, weight, pooled)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection: nothing to shard"
        )
    return found


def _choose(kinds: Mapping[str, str], tables: Mapping[str, _Table]) -> dict[str, str]:
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
        if optimizer not in _EVERYWHERE:
            return f"copies of a table on every rank train with {', '.join(_EVERYWHERE)} only, not with {optimizer}"
        return ""
    parts = column_parts(kind, nranks, local)
    if columns % (4 * parts):
        width = f"{columns} columns in {parts} parts" if parts > 1 else f"{columns} columns"
        return f"{width}: FBGEMM needs a multiple of 4 in each, so the table has to have a multiple of {4 * parts}"
    return ""


def _hooks(path: str, module: nn.Module, plan: Plan) -> Callable[[nn.Module], None]:
    """Prepare a module that is to be sharded; returns what to do with the sharded model that it is in."""
    if not isinstance(module, EmbeddingBagCollection):
        return lambda parallel: None
    features = {config.name: config.feature_names for config in module.embedding_bag_configs()}
    names = list(module._embedding_names)
    by_rows = any(plan.kinds[name] in _ROW_KINDS for name in features)
    means = sum_instead(module) if by_rows else {}

    def add(parallel: nn.Module) -> None:
        sharded = parallel.get_submodule(path)
        if any(means.values()):
            divide_means(sharded, means, features)
        restore_order(sharded, names)
        if by_rows and dist.get_backend() == "gloo":
            pad_to_largest(sharded)

    return add


def _sharders(fused: dict[str, Any]) -> list[Any]:
    class Bags(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(KINDS)  # TorchRec offers those with rows on GPUs only

    return [Bags(fused_params=fused), EmbeddingCollectionSharder(fused_params=fused)]


def _plan(
    model: nn.Module,
    tables: Mapping[str, _Table],
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
    tables: Mapping[str, _Table],
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


def _dense_parameters(model: nn.Module, tables: Mapping[str, _Table]) -> dict[str, nn.Parameter]:
    weights = {id(table.weight) for table in tables.values()}
    return {key: p for key, p in model.named_parameters() if p.requires_grad and id(p) not in weights}


def _unsharded(parallel: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """State-dict key → parameter of what every rank has a copy of and DistributedDataParallel averages."""
    # TorchRec marks the others, whose gradients never reach us.
    return {
        key: p
        for key, p in parallel.named_parameters()
        if p.requires_grad and not hasattr(p, "_in_backward_optimizers")
    }


def _template(model: nn.Module) -> nn.Module:
    """A copy of the model without the memory of its parameters."""
    meta = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, dict(meta))


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give the modules on the meta device that are not tables their initial values, before TorchRec draws any."""
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        inside = any(isinstance(model.get_submodule(up), _COLLECTIONS) for up in _ancestors(path))
        if inside or isinstance(module, _COLLECTIONS) or not any(t.device.type == "meta" for t in own):
            continue
        if not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{path or type(model).__name__} is on the meta device and has no reset_parameters() to initialise "
                "it: build it on the CPU, and only the tables on meta"
            )
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()


_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


def _ancestors(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts))]


def _common_seed() -> int:
    seed = torch.randint(2**31, (1,)).to(_device())
    dist.broadcast(seed, src=0)
    return int(seed)


def _forget_old_groups() -> None:
    """TorchRec keeps the groups it made in globals, past the end of the process group that they were made in."""
    known = dist.distributed_c10d._world.pg_map
    for name in ("_INTRA_PG", "_CROSS_PG"):
        if getattr(comm, name) is not None and getattr(comm, name) not in known:
            setattr(comm, name, None)


@torch.no_grad()
def _fill(parallel: DistributedModelParallel, tables: Mapping[str, _Table], seed: int) -> None:
    """Give the shards their table's values. TorchRec leaves out those of a table on the CPU, and on the meta device
    gives every rank's shard the same ones, as the ranks are seeded alike."""
    state = parallel.state_dict()
    for table in tables.values():
        held = state[table.key]
        whole = [(held, (0, 0))]  # of a data_parallel table
        parts = [(s.tensor, s.metadata.shard_offsets) for s in held.local_shards()] if _split(held) else whole
        for tensor, (row, column) in parts:
            for first, values in _values(table, seed, row, row + tensor.shape[0]):
                into = tensor[first - row : first - row + len(values)]
                into.copy_(values[:, column : column + tensor.shape[1]])


def _split(tensor: Any) -> bool:
    return hasattr(tensor, "local_shards")


def _values(table: _Table, seed: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows start..stop of a table, of shape (some, columns) with the number of the first, a block at a time."""
    if table.weight.device.type != "meta":
        yield start, table.weight[start:stop]
        return
    rows, columns = table.weight.shape
    height = max(1, _BLOCK // columns)
    for first in range(start - start % height, stop, height):
        torch.manual_seed(zlib.crc32(f"{seed} {table.name} {first}".encode()))
        block = torch.empty(min(height, rows - first), columns, dtype=table.weight.dtype)
        table.config.init_fn(block)
        low = max(start, first)
        yield low, block[low - first : stop - first]


def _ignore_warnings_in_training() -> None:
    """What torch tells of TorchRec's use of it, in steps that are the user's own; for the rest of this rank's life."""
    # FBGEMM's dense lookup has its gradient in its CPU and CUDA backends, where torch does not look for it.
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")
    # As of torch 2.13 and TorchRec 1.8.
    warnings.filterwarnings("ignore", message=".torch.distributed.*_tensor. is deprecated", category=FutureWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep TorchRec's notes on its own workings out of the cell."""
    loggers = [logging.getLogger("torchrec"), logging.getLogger()]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

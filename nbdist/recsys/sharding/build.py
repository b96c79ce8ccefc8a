"""From a model with embedding tables to one whose tables are sharded over the ranks, with TorchRec.

Inside a rank::

    from nbdist.recsys.sharding import shard

    def train():
        sharded = shard(Model(), {"users": "row_wise", "small_*": "data_parallel"}, batch_size=512)
        for batch in equal_steps(loader()):
            sharded.optimizer.zero_grad()
            loss(sharded.model(batch.features), batch.labels).backward()
            sharded.optimizer.step()
        return sharded.plan, sharded.gather()

`STRATEGIES` are TorchRec's: a table whole on one rank (table_wise), split by rows (row_wise; table_row_wise: over the
ranks of one machine), by columns (column_wise; table_column_wise), by both (grid_shard), or a copy on every rank
(data_parallel). TorchRec itself offers no strategy with rows on CPUs; here all work on CPU ranks (gloo) as on GPUs.

The gradient of a step is the mean of the ranks' gradients, and buffers, such as those of batch norm, are rank 0's in
each forward pass, as in DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel, comm
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import KeyedOptimizerWrapper

from ...devices import collective_device
from ...wire.huge_pages import gather
from ...wire.shared_group import shared_group
from ..parallel.ahead import InputsAhead
from ..parallel.deferred import DeferredTables, TablesOptimizer, deferring
from ..parallel.plan import Plan
from ..parallel.sharded import Sharded, kernels, share_buffers
from .annotations import annotate_for_profilers_alone
from .collections import find_tables, to_torchrec
from .exchange import exchange_at_once
from .hooks import (
    check_ids,
    divide_means,
    look_up_singly,
    move_inputs,
    pad_batches,
    restore_order,
    sum_instead,
    take_columns,
)
from .initial import common_seed, fill, let_go, materialise, without_memory
from .planning import Planner, make_sharders
from .strategies import (
    EVERYWHERE,
    OPTIMIZERS,
    ROW_STRATEGIES,
    Table,
    check_optimizer,
    choose,
    fused_types,
    of_each,
    too_large_to_copy,
)


def shard(
    model: nn.Module,
    strategies: Mapping[str, str] | None = None,
    *,
    batch_size: int,
    optimizer: str | Mapping[str, str] = "rowwise_adagrad",
    lr: float | Mapping[str, float] = 0.01,
    eps: float = 1e-8,
    dense_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    fused: bool | None = None,
    memory: int | None = None,
    checked: bool = True,
) -> Sharded:
    """Shard the embedding tables of `model` over all ranks. All ranks have to call it, with the same arguments.

    Tables on the meta device are never whole anywhere: each rank makes its own part, with the table's `init_fn`, block
    by block, from seeds drawn from torch's random state. So the initial weights depend neither on the strategies nor on
    the number of ranks. Tables with values keep them; each rank has them whole until it has its part.

    rowwise_adagrad keeps one number per row of a shard. A table split by columns has several per row, and so learns a
    little differently from the same table in one piece; sgd and adagrad do not.

    Args:
        model: A module with `EmbeddingBagCollection`s or `EmbeddingCollection`s, or one of those. It is consumed: use
            `Sharded.model` instead.
        strategies: Table name or glob → one of `STRATEGIES`. A name goes before globs, and globs in their order.
            Tables that nothing matches are left to TorchRec's planner. A large table that is data_parallel is slow, and
            warned of.
        batch_size: Samples per rank and step, for the planner's estimates.
        optimizer: One of `OPTIMIZERS`, fused into the tables' backward pass where FBGEMM can; or table name or glob →
            one. CPU ranks have sgd, adagrad, rowwise_adagrad and, not fused, adam. All leave alone the rows that a
            batch does not touch, as `torch.optim.SparseAdam` does.
        lr: Learning rate of the tables; or table name or glob → one.
        eps: What is added to the denominator, for those optimizers that have one.
        dense_optimizer: Makes the optimizer of all other parameters, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`. Needed if there are any.
        fused: Whether tables are updated in the backward pass. None: those whose optimizer FBGEMM has a kernel for on
            this device; adam on CPUs is torch's, and slower. False: no table, so that gradients can be clipped and
            accumulated; slower, too, and for sgd, adagrad, rowwise_adagrad and adam.
        memory: Bytes per rank that the plan may use for tables. None: 85 % of what is free (on CPUs divided by the
            ranks of this machine), less four times the size of the other parameters, for their gradients and moments.
        checked: Whether an id outside its table is a `ValueError` in the step that has it. On GPUs each step waits for
            that, unless a loader with `keyed=` has looked before; without it, such ids are those of other rows, and
            train them.

    Raises:
        ValueError: Before anything is built, for an optimizer, a strategy or a size that cannot work; it says why.
        RuntimeError: Outside a process group.

    Examples:
        >>> import torch
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import keyed_jagged
        >>> from nbdist.recsys.sharding import shard
        >>> def train():
        ...     users = EmbeddingBagConfig(name="users", num_embeddings=100, embedding_dim=8, feature_names=["user"])
        ...     model = EmbeddingBagCollection(tables=[users], device=torch.device("meta"))
        ...     sharded = shard(model, {"users": "row_wise"}, batch_size=2, optimizer="adagrad", lr=0.1)
        ...     features = keyed_jagged({"user": torch.tensor([5, 97])}, ["user"])
        ...     sharded.optimizer.zero_grad()
        ...     sharded.model(features).values().square().mean().backward()
        ...     sharded.optimizer.step()
        ...     return sharded.gather()
        >>> in_ddp(2, train).embedding_bags["users"].weight.shape
        torch.Size([100, 8])
    """
    if not dist.is_initialized():
        raise RuntimeError("shard() works in a rank: call it in a function that in_ddp or a Session runs")
    device = collective_device()
    tables = find_tables(model)
    named, rates = of_each("optimizer=", optimizer, tables), of_each("lr=", lr, tables)
    for one in dict.fromkeys(named.values()):
        check_optimizer(one, device, fused)
    chosen = choose(strategies or {}, tables)
    dense = _dense_parameters(model, tables)
    if dense and dense_optimizer is None:
        raise ValueError(
            f"the model has parameters beside its tables ({', '.join(list(dense)[:3])}, ...): give "
            "dense_optimizer, such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    for name, strategy in chosen.items():
        why = too_large_to_copy(tables[name], batch_size * dist.get_world_size())
        if strategy == "data_parallel" and why and dist.get_rank() == 0:
            warnings.warn(f"table {name!r} is to be data_parallel: {why}. row_wise is faster", stacklevel=2)
    sharders = make_sharders({"eps": eps})
    for name, table in tables.items():  # where TorchRec looks for it
        table.weight._optimizer_kwargs = [{"optimizer": OPTIMIZERS[named[name]], "learning_rate": rates[name]}]  # type: ignore[attr-defined]
    template = without_memory(model)
    model, taken = to_torchrec(model)
    with _quiet(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # TorchRec draws as many random numbers as a rank has weights; the ranks are to stay alike.
        # gloo sends what ranks of one machine have for each other through its network's loopback.
        group = shared_group() if device.type == "cpu" else None
        planner = Planner(model, tables, chosen, sharders, named, batch_size, memory, device, group)
        torchrec_plan, plan = planner.plan()
        seed = common_seed(device)
        materialise(model, device)
        let_go(model, tables)
        _forget_old_groups()
        by_gloo = ROW_STRATEGIES if device.type == "cpu" and group is None else ()
        hooks = [_hooks(path, module, plan, checked, by_gloo) for path, module in model.named_modules()]
        features = _features(model)
        types = fused_types(device, fused)
        with deferring(types):
            parallel = DistributedModelParallel(
                model,
                env=ShardingEnv.from_process_group(group or dist.group.WORLD),
                device=device,
                plan=torchrec_plan,
                sharders=sharders,
            )
        for add in hooks:
            add(parallel.module)
        for path, columns in taken.items():
            take_columns(parallel.module.get_submodule(path), columns)
        collections = {parallel.module.get_submodule(path): names for path, names in features.items()}
        for collection in collections:
            exchange_at_once(collection)
        fill(parallel.state_dict(), tables, seed)
        for kernel in kernels(parallel.fused_optimizer):
            _gather(kernel)
    if device.type != "cpu":
        move_inputs(parallel, device)
    names = [name for name, _ in template.named_buffers()]
    if names:
        # As DistributedDataParallel does; TorchRec has it leave that out, because FBGEMM's modules have buffers, too.
        parallel.register_forward_pre_hook(lambda module, _: share_buffers(module, names))
    _ignore_warnings_in_training()
    annotate_for_profilers_alone()
    optimizers = [parallel.fused_optimizer]
    copies = _unsharded(parallel)
    mine = {key: p for key, p in copies.items() if key in dense}
    if mine:
        optimizers.append(KeyedOptimizerWrapper(mine, dense_optimizer))
    for table in tables.values():
        if table.key in copies:
            make = EVERYWHERE[named[table.name]]
            rate = rates[table.name]
            some = {table.key: copies[table.key]}
            optimizers.append(KeyedOptimizerWrapper(some, functools.partial(make, lr=rate, eps=eps)))
    waiting = [kernel for kernel in kernels(parallel.fused_optimizer) if isinstance(kernel, DeferredTables)]
    any_fused = any(
        OPTIMIZERS[named[table]] in types for table, how in plan.strategies.items() if how != "data_parallel"
    )
    ahead = InputsAhead(collections, device) if dist.get_world_size() > 1 else None
    return Sharded(parallel, TablesOptimizer(optimizers, waiting), plan, template, any_fused, ahead)


def _gather(kernel: Any) -> None:
    """Put FBGEMM's tables of a CPU rank, and what is kept of their rows, in huge pages.

    A step's rows are all over a table: in small pages each is in another one, and it takes time to find that.
    """
    for tensor in (*kernel.split_embedding_weights(), *itertools.chain(*kernel.split_optimizer_states())):
        if tensor.device.type == "cpu":
            gather(tensor.data_ptr(), tensor.nbytes)


def _hooks(
    path: str, module: nn.Module, plan: Plan, checked: bool, by_gloo: Sequence[str]
) -> Callable[[nn.Module], None]:
    """Prepare a module that is to be sharded; returns what to do with the sharded model that it is in.

    `by_gloo` are the strategies for which gloo scatters what it adds up.
    """
    if isinstance(module, EmbeddingCollection):
        rows = _rows(module.embedding_configs())

        def add_to_sequences(parallel: nn.Module) -> None:
            sharded = parallel.get_submodule(path)
            if checked:
                check_ids(sharded, rows)
            look_up_singly(sharded)
            pad_batches(sharded, False)

        return add_to_sequences
    if not isinstance(module, EmbeddingBagCollection):
        return lambda parallel: None
    features = {config.name: config.feature_names for config in module.embedding_bag_configs()}
    rows = _rows(module.embedding_bag_configs())
    names = list(module._embedding_names)
    by_rows = any(plan.strategies[name] in ROW_STRATEGIES for name in features)
    means = sum_instead(module) if by_rows else {}

    def add_to_bags(parallel: nn.Module) -> None:
        sharded = parallel.get_submodule(path)
        if checked:
            check_ids(sharded, rows)
        if any(means.values()):
            divide_means(sharded, means, features)
        restore_order(sharded, names)
        pad_batches(sharded, any(plan.strategies[name] in by_gloo for name in features))

    return add_to_bags


def _features(model: nn.Module) -> dict[str, set[str]]:
    """Path of each collection → the features that it takes."""
    return {
        path: set(_rows(module.embedding_bag_configs() if bags else module.embedding_configs()))
        for path, module in model.named_modules()
        if (bags := isinstance(module, EmbeddingBagCollection)) or isinstance(module, EmbeddingCollection)
    }


def _rows(configs: Iterable[Any]) -> dict[str, list[tuple[str, int]]]:
    """Feature → the tables that it is looked up in, each with its number of rows."""
    rows: dict[str, list[tuple[str, int]]] = {}
    for config in configs:
        for feature in config.feature_names:
            rows.setdefault(feature, []).append((config.name, config.num_embeddings))
    return rows


def _dense_parameters(model: nn.Module, tables: Mapping[str, Table]) -> dict[str, nn.Parameter]:
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


def _forget_old_groups() -> None:
    """TorchRec keeps the groups it made in globals, past the end of the process group that they were made in."""
    known = dist.distributed_c10d._world.pg_map
    for name in ("_INTRA_PG", "_CROSS_PG"):
        if getattr(comm, name) is not None and getattr(comm, name) not in known:
            setattr(comm, name, None)


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

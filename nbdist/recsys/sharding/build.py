"""Sharding of a model's embedding tables over the ranks, with TorchRec.

`STRATEGIES` are TorchRec's: a table whole on one rank (table_wise), split by rows (row_wise; table_row_wise: over the
ranks of one machine), by columns (column_wise; table_column_wise), by both (grid_shard), or a copy on every rank
(data_parallel). TorchRec alone cannot split tables by rows on CPUs. Here, all strategies work on CPU ranks (gloo) and
on GPUs.

The gradient of a step is the mean of the ranks' gradients. Buffers, such as batch norm's, are copied from rank 0 in
each forward pass, as in DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel, comm
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper

from ...devices import collective_device
from ...shm.process_group import shared_group
from ...system.huge_pages import gather
from ..parallel.optimizer_choice import MakeOptimizer, Momentum
from .annotations import annotate_for_profilers_alone
from .batches_ahead import InputsAhead
from .collection_hooks import prepare_collections
from .collections import find_tables, plain_collections, replace, to_torchrec
from .deferred import DeferredTables, TablesOptimizer, deferring
from .half_tables import SinglePrecision, check_types
from .hooks import move_inputs
from .initial import common_seed, fill, free_tables, materialise, without_memory
from .optimizers import EVERYWHERE, MOMENTUM, TYPES, check_momentum, check_optimizer, fused_types
from .plan import Plan
from .planning import Planner, check_topology, choose_kernels, make_sharders
from .sharded import Sharded, kernels, share_buffers
from .strategies import ROW_STRATEGIES, Table, choose, of_each, too_large_to_copy


def build(
    model: nn.Module,
    strategies: Mapping[str, str],
    *,
    batch_size: int,
    optimizer: str | Mapping[str, str],
    lr: float | Mapping[str, float],
    eps: float,
    momentum: Momentum | None,
    dense_optimizer: MakeOptimizer | None,
    fused: bool | None,
    memory: int | None,
    compute_kernels: Mapping[str, str],
    topology: Topology | None,
    checked: bool,
) -> Sharded:
    """Shard a model; `shard` describes arguments and errors. TorchRec must be installed."""
    device, tables = collective_device(), find_tables(model)
    named, rates, fused = _optimizers_of(tables, optimizer, lr, device, fused, momentum)
    check_types(tables)
    chosen = choose(strategies, tables)
    chosen_kernels = choose_kernels(compute_kernels, tables, device, fused)
    check_topology(topology, memory, device)
    dense = _dense_parameters(model, tables, dense_optimizer)
    _warn_of_copies(tables, chosen, batch_size)
    sharders = make_sharders({"eps": eps})
    _name_optimizers(tables, named, rates, momentum)
    template, plain = without_memory(model), plain_collections(model)
    with _quiet(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # TorchRec draws as many random numbers as a rank has weights; the ranks are to stay alike.
        # gloo sends what ranks of one machine have for each other through its network's loopback.
        group = shared_group() if device.type == "cpu" else None
        model = replace(model, {path: to_torchrec(one) for path, one in plain.items()})
        planner = Planner(
            model, tables, chosen, sharders, named, batch_size, memory, device, group, chosen_kernels, topology
        )
        torchrec_plan, plan = _planned(planner, model, plain)
        seed = common_seed(device)
        materialise(model, device)
        free_tables(model, tables)
        _forget_old_groups()
        by_gloo = ROW_STRATEGIES if device.type == "cpu" and group is None else ()
        finish = prepare_collections(model, plain, plan, checked, by_gloo)
        types = fused_types(device, fused)
        with deferring({EmbOptimType[TYPES[name]] for name in types}):
            parallel = DistributedModelParallel(
                model,
                env=ShardingEnv.from_process_group(group or dist.group.WORLD),
                device=device,
                plan=torchrec_plan,
                sharders=sharders,
            )
        collections = finish(parallel.module)
        fill(parallel.state_dict(), tables, seed)
    _prepare_steps(parallel, template, device)
    of_copies = _dense_optimizers(parallel, tables, dense, dense_optimizer, named, rates, eps)
    waiting = [kernel for kernel in kernels(parallel.fused_optimizer) if isinstance(kernel, DeferredTables)]
    any_fused = any(named[table] in types for table, how in plan.strategies.items() if how != "data_parallel")
    ahead = InputsAhead(collections, device) if dist.get_world_size() > 1 else None
    trained = TablesOptimizer([parallel.fused_optimizer, *of_copies], waiting)
    return Sharded(parallel, trained, plan, template, any_fused, ahead)


def _planned(planner: Planner, model: nn.Module, plain: Mapping[str, nn.Module]) -> tuple[ShardingPlan, Plan]:
    """Return the plans. If there is none, put the plain collections back into the model, and raise `ValueError`."""
    try:
        return planner.plan()
    except ValueError:
        replace(model, plain)  # it may be sharded in another way
        raise


def _optimizers_of(
    tables: Mapping[str, Table],
    optimizer: str | Mapping[str, str],
    lr: float | Mapping[str, float],
    device: torch.device,
    fused: bool | None,
    momentum: Momentum | None,
) -> tuple[dict[str, str], dict[str, float], bool | None]:
    """Return the optimizer and the learning rate of each table, and `fused`, which is False with momentum.

    Raises `ValueError` for an optimizer that the device or `fused` excludes.
    """
    named = of_each("optimizer=", optimizer, tables)
    for one in dict.fromkeys(named.values()):
        check_optimizer(one, device, fused)
    if momentum is not None:
        check_momentum(fused)
        named, fused = dict.fromkeys(tables, MOMENTUM), False
    return named, of_each("lr=", lr, tables), fused


def _name_optimizers(
    tables: Mapping[str, Table], named: Mapping[str, str], rates: Mapping[str, float], momentum: Momentum | None
) -> None:
    """Write the optimizers of the tables to the attributes in which TorchRec looks for them."""
    further = {} if momentum is None else {"momentum": momentum.factor, "nesterov": momentum.nesterov}
    for name, table in tables.items():
        options = {"optimizer": EmbOptimType[TYPES[named[name]]], "learning_rate": rates[name], **further}
        table.weight._optimizer_kwargs = [options]  # type: ignore[attr-defined]


def _warn_of_copies(tables: Mapping[str, Table], chosen: Mapping[str, str], batch_size: int) -> None:
    """Warn, on rank 0, of tables that are too large for a copy on each rank."""
    for name, strategy in chosen.items():
        why = too_large_to_copy(tables[name], batch_size * dist.get_world_size())
        if strategy == "data_parallel" and why and dist.get_rank() == 0:
            warnings.warn(f"table {name!r} is sharded as data_parallel: {why}. row_wise is faster", stacklevel=4)


def _dense_optimizers(
    parallel: DistributedModelParallel,
    tables: Mapping[str, Table],
    dense: Mapping[str, nn.Parameter],
    dense_optimizer: MakeOptimizer | None,
    named: Mapping[str, str],
    rates: Mapping[str, float],
    eps: float,
) -> Iterator[KeyedOptimizerWrapper]:
    """Make the optimizers of the parameters that are copied on every rank: dense layers and data_parallel tables."""
    copies = _unsharded(parallel)
    if mine := {key: p for key, p in copies.items() if key in dense}:
        yield KeyedOptimizerWrapper(mine, dense_optimizer)
    for name, table in tables.items():
        if table.key in copies:
            make: MakeOptimizer = functools.partial(EVERYWHERE[named[name]], lr=rates[name], eps=eps)
            if copies[table.key].dtype == torch.float16:
                make = functools.partial(SinglePrecision, make=make)
            yield KeyedOptimizerWrapper({table.key: copies[table.key]}, make)


def _prepare_steps(parallel: DistributedModelParallel, template: nn.Module, device: torch.device) -> None:
    """Prepare the steps of a sharded model: memory, devices, buffers, warnings and annotations."""
    _gather(parallel)
    if device.type != "cpu":
        move_inputs(parallel, device)
    names = [name for name, _ in template.named_buffers()]
    if names:
        # As DistributedDataParallel does; TorchRec has it leave that out, because FBGEMM's modules have buffers, too.
        parallel.register_forward_pre_hook(lambda module, _: share_buffers(module, names))
    _ignore_warnings_in_training()
    annotate_for_profilers_alone()


def _gather(parallel: DistributedModelParallel) -> None:
    """Move FBGEMM's tables of a CPU rank, and the state of their rows, to huge pages.

    The rows of a step are scattered over a table: each is in another small page, and finding this page takes time.
    """
    for kernel in kernels(parallel.fused_optimizer):
        for tensor in (*kernel.split_embedding_weights(), *itertools.chain(*kernel.split_optimizer_states())):
            if tensor.device.type == "cpu":
                gather(tensor.data_ptr(), tensor.nbytes)


def _dense_parameters(
    model: nn.Module, tables: Mapping[str, Table], dense_optimizer: MakeOptimizer | None
) -> dict[str, nn.Parameter]:
    """Return the parameters that are not tables. Raises `ValueError` if there are any, but no optimizer for them."""
    weights = {id(table.weight) for table in tables.values()}
    dense = {key: p for key, p in model.named_parameters() if p.requires_grad and id(p) not in weights}
    if dense and dense_optimizer is None:
        raise ValueError(
            f"the model has other parameters than its tables ({', '.join(list(dense)[:3])}, ...): give "
            "dense_optimizer, such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    return dense


def _unsharded(parallel: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Return the parameters, by state-dict key, that are copied on every rank and that DistributedDataParallel
    averages."""
    # TorchRec marks the others, whose gradients never reach us.
    return {
        key: p
        for key, p in parallel.named_parameters()
        if p.requires_grad and not hasattr(p, "_in_backward_optimizers")
    }


def _forget_old_groups() -> None:
    """Forget the process groups that TorchRec keeps in globals after they have ended."""
    known = dist.distributed_c10d._world.pg_map
    for name in ("_INTRA_PG", "_CROSS_PG"):
        if getattr(comm, name) is not None and getattr(comm, name) not in known:
            setattr(comm, name, None)


def _ignore_warnings_in_training() -> None:
    """Silence torch's warnings about TorchRec in the user's own steps, for the rest of this rank's life."""
    # FBGEMM's dense lookup has its gradient in its CPU and CUDA backends, where torch does not look for it.
    warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")
    # As of torch 2.13 and TorchRec 1.8.
    warnings.filterwarnings("ignore", message=".torch.distributed.*_tensor. is deprecated", category=FutureWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep TorchRec's own log messages out of the cell."""
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

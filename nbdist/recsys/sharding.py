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
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import planning
from .plan import Plan
from .planning import KINDS, OPTIMIZERS, Table
from .uneven import equal_steps

# After planning, which makes sure that TorchRec and FBGEMM are there.
from torchrec import EmbeddingBagCollection, EmbeddingCollection  # isort: skip
from torchrec.distributed import DistributedModelParallel, comm  # isort: skip
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # isort: skip

from .pooling import divide_means, pad_to_largest, restore_order, sum_instead  # isort: skip

__all__ = ["KINDS", "OPTIMIZERS", "Plan", "Sharded", "equal_steps", "shard"]

_BLOCK = 2**17
"""Elements of a table that are initialised at a time: what the initialisation takes beside the shards."""


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
    planning.check_optimizer(optimizer, device)
    tables = planning.find_tables(model)
    chosen = planning.choose(kinds or {}, tables)
    dense = _dense_parameters(model, tables)
    if dense and dense_optimizer is None:
        raise ValueError(
            f"the model has parameters beside its tables ({', '.join(list(dense)[:3])}, ...): give "
            "dense_optimizer, such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    sharders = planning.make_sharders({"optimizer": OPTIMIZERS[optimizer], "learning_rate": lr, "eps": eps})
    template = _template(model)
    with _quiet(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # TorchRec draws as many random numbers as a rank has weights; the ranks are to stay alike.
        torchrec_plan, plan = planning.make_plan(model, tables, chosen, sharders, optimizer, batch_size, memory, device)
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
        (
            {key: p for key, p in copies.items() if key not in dense},
            lambda some: planning.EVERYWHERE[optimizer](some, lr, eps),
        ),
    ):
        if mine:
            optimizers.append(KeyedOptimizerWrapper(mine, make))
    return Sharded(parallel, CombinedOptimizer(optimizers), plan, template)


def _device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _hooks(path: str, module: nn.Module, plan: Plan) -> Callable[[nn.Module], None]:
    """Prepare a module that is to be sharded; returns what to do with the sharded model that it is in."""
    if not isinstance(module, EmbeddingBagCollection):
        return lambda parallel: None
    features = {config.name: config.feature_names for config in module.embedding_bag_configs()}
    names = list(module._embedding_names)
    by_rows = any(plan.kinds[name] in planning.ROW_KINDS for name in features)
    means = sum_instead(module) if by_rows else {}

    def add(parallel: nn.Module) -> None:
        sharded = parallel.get_submodule(path)
        if any(means.values()):
            divide_means(sharded, means, features)
        restore_order(sharded, names)
        if by_rows and dist.get_backend() == "gloo":
            pad_to_largest(sharded)

    return add


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
def _fill(parallel: DistributedModelParallel, tables: Mapping[str, Table], seed: int) -> None:
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
        if not _split(held):
            dist.broadcast(held, src=0)  # the copies have to be one, even if the ranks' own tables were not


def _split(tensor: Any) -> bool:
    return hasattr(tensor, "local_shards")


def _values(table: Table, seed: int, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
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

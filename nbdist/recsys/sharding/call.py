"""The function `shard`, which imports TorchRec and FBGEMM when it is called."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from ...devices import collective_device
from ..parallel.optimizer_choice import EPS, LR, MakeOptimizer, check_alone, described
from ..versions import check_gpu, check_torchrec
from .sharded import Sharded

with contextlib.suppress(ImportError):  # `shard` raises it again
    check_torchrec()
    from . import build  # noqa: F401  # here, so that the fork server has TorchRec, and not each rank in each call


def shard(
    model: nn.Module,
    strategies: Mapping[str, str] | None = None,
    *,
    batch_size: int,
    optimizer: str | MakeOptimizer | Mapping[str, str] = "rowwise_adagrad",
    lr: float | Mapping[str, float] | None = None,
    eps: float | None = None,
    dense_optimizer: MakeOptimizer | None = None,
    fused: bool | None = None,
    memory_bytes: int | None = None,
    checked: bool = True,
) -> Sharded:
    """Shard the embedding tables of `model` over all ranks. All ranks must call it, with the same arguments.

    Tables on the meta device are never whole anywhere: each rank makes its own part, with the table's `init_fn`, block
    by block, from seeds drawn from torch's random state; a rank with a GPU makes it there. So the initial weights
    depend neither on the strategies nor on the number of ranks; a CPU, and each model of GPU, draws its own numbers.
    Tables with values keep them; each rank has them whole until it has its part.

    rowwise_adagrad keeps one number per row of a shard. A table split by columns has several per row, and so learns
    slightly differently from the same table in one piece; sgd and adagrad do not differ.

    Args:
        model: A module with `PooledTables` or `SequenceTables`, as the models of `nbdist.recsys.models` are, or with
            TorchRec's `EmbeddingBagCollection`s or `EmbeddingCollection`s; or a single collection. The module cannot be
            used afterwards: use `Sharded.model`.
        strategies: Table name or glob → one of `STRATEGIES`. A name goes before globs, and globs in their order. Tables
            that nothing matches are left to TorchRec's planner. A warning names large tables that are data_parallel,
            because they are slow.
        batch_size: Samples per rank and step, for the planner's estimates.
        optimizer: The tables' optimizer: one of `OPTIMIZERS`, fused into the backward pass where FBGEMM can; or table
            name or glob → one of them. CPU ranks have sgd, adagrad, rowwise_adagrad and, not fused, adam. Or, as for
            `replicate`, a function from parameters to their optimizer: torch's SGD, Adagrad or Adam, with no options
            but `lr` and `eps`; it is the dense optimizer, too, unless `dense_optimizer` is given. All optimizers of
            tables leave alone the rows that a batch does not touch, as `torch.optim.SparseAdam` does.
        lr: Learning rate of the tables, for an optimizer by name; or table name or glob → learning rate. None: 0.01.
        eps: The number added to the denominator, for optimizers by name that have one. None: 1e-8.
        dense_optimizer: Function that makes the optimizer of all other parameters, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`. Needed if there are any and `optimizer` is a
            name.
        fused: Whether tables are updated in the backward pass. None: a table is if FBGEMM has a kernel for its
            optimizer on this device; for adam on CPUs, torch's slower optimizer is used. False: no table is, so that
            gradients can be clipped and accumulated. That is slower, and works with sgd, adagrad, rowwise_adagrad and
            adam.
        memory_bytes: Bytes per rank that the plan may use for tables. None: 85 % of the free bytes (on CPUs, shared by
            the ranks of this machine), less four times the size of the other parameters, for gradients and moments.
        checked: Whether an id outside its table raises `ValueError` in its step. On GPUs each step waits for this
            check, unless a loader with `keyed=` has already checked the ids. Without the check, such an id stands for
            another row and trains it.

    Raises:
        ValueError: Before anything is built, for an optimizer, a strategy or a size that cannot work; it says why.
        RuntimeError: Outside a process group; or FBGEMM has no code for this rank's GPU, such as a T4: use `replicate`.
        ImportError: TorchRec or FBGEMM is missing, or of another release than torch; it says what to install. The model
            is left as it is.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.models import PooledTables
        >>> from nbdist.recsys.sharding import shard
        >>> def train():
        ...     model = PooledTables({"user": 100}, embedding_dim=8, device="meta")
        ...     sharded = shard(model, {"user": "row_wise"}, batch_size=2, optimizer="adagrad", lr=0.1)
        ...     sharded.optimizer.zero_grad()
        ...     sharded.model({"user": torch.tensor([5, 97])}).square().mean().backward()
        ...     sharded.optimizer.step()
        ...     return sharded.gather()
        >>> in_ddp(2, train).embedding_bags["user"].weight.shape
        torch.Size([100, 8])
    """
    if not dist.is_initialized():
        raise RuntimeError("shard() works in a rank: call it in a function that in_ddp or a Session runs")
    check_torchrec()
    check_gpu(collective_device())
    from .build import build

    if callable(optimizer):
        check_alone(lr, eps)
        dense_optimizer = dense_optimizer or optimizer
        optimizer, lr, eps = described(optimizer)
    return build(
        model,
        strategies or {},
        batch_size=batch_size,
        optimizer=optimizer,
        lr=LR if lr is None else lr,
        eps=EPS if eps is None else eps,
        dense_optimizer=dense_optimizer,
        fused=fused,
        memory=memory_bytes,
        checked=checked,
    )

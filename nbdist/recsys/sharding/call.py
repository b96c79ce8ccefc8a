"""The function `shard`, which imports TorchRec and FBGEMM when it is called."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

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
    compute_kernels: Mapping[str, str] | None = None,
    topology: Any | None = None,
    checked: bool = True,
) -> Sharded:
    """Shard the embedding tables of `model` over all ranks. All ranks must call it, with the same arguments.

    Tables on the meta device are never in one place as a whole: each rank makes its own part, with the table's
    `init_fn`, block by block, from seeds drawn from torch's random state; a rank with a GPU makes it there. So the
    initial weights depend neither on the strategies nor on the number of ranks. (A CPU, and each model of GPU, gives
    other numbers.) Tables with values keep them; each rank has them as a whole until it has its part.

    rowwise_adagrad keeps one number per row of a shard. A table that is split by columns has several numbers per row,
    so it learns slightly differently from an unsplit table. With sgd and adagrad there is no difference.

    Args:
        model: A module with `PooledTables` or `SequenceTables`, such as the models of `nbdist.recsys.models`, or with
            TorchRec's `EmbeddingBagCollection`s or `EmbeddingCollection`s; or a single collection. The module cannot be
            used afterwards: use `Sharded.model`.
        strategies: A mapping from table names or glob patterns to strategies, any of `STRATEGIES`. A name takes
            precedence over patterns, and an earlier pattern over a later one. TorchRec's planner chooses for tables
            that nothing matches. A warning names large tables that are data_parallel, because they are slow.
        batch_size: The number of samples of a step on each rank, for the planner's estimates.
        optimizer: The optimizer of the tables: one of `OPTIMIZERS`, or a mapping from table names or patterns to them.
            It is fused into the backward pass if FBGEMM can do so. CPU ranks have sgd, adagrad, rowwise_adagrad and,
            not fused, adam. Or a function from parameters to their optimizer: torch's SGD, Adagrad or Adam, with no
            options except `lr`, `eps`, and, not fused, SGD's `momentum` and `nesterov`. Such a function is also the
            dense optimizer, unless `dense_optimizer` is given. No optimizer changes rows of a table that a batch does
            not use, like `torch.optim.SparseAdam`; the velocity of such a row does not change, either.
        lr: The learning rate of the tables, for an optimizer that is given by name; or a mapping from table names or
            patterns to learning rates. None: 0.01.
        eps: The number added to the denominator by an optimizer that is given by name and has one. None: 1e-8.
        dense_optimizer: A function that makes the optimizer of all other parameters, such as `lambda parameters:
            torch.optim.Adam(parameters, lr=1e-3)`. It is needed if there are any and `optimizer` is a name.
        fused: Whether tables are updated in the backward pass. None: a table is, if FBGEMM has a kernel for its
            optimizer on this device; for adam on CPUs, and SGD with momentum, torch's slower optimizer is used. False:
            no table is, so that gradients can be clipped and accumulated. That is slower, and works with sgd, adagrad,
            rowwise_adagrad and adam.
        memory_bytes: The number of bytes per rank that the plan may use for tables. None: 85 % of the free bytes (on
            CPUs, shared by the ranks of this machine), minus four times the size of the other parameters, for gradients
            and moments.
        compute_kernels: A mapping from table names or patterns to TorchRec's compute kernels: "fused", in the device's
            memory; on GPUs also "fused_uvm", in the host's memory, or "fused_uvm_caching", there with a cache of rows
            on the GPU. Not with `fused=False`. None: in the device's memory.
        topology: A `torchrec.distributed.planner.Topology` of these ranks, for the planner. It replaces the measured
            bandwidths and `memory_bytes`. None: the bandwidths are measured.
        checked: Whether an id outside its table raises `ValueError` in its step. On GPUs, each step waits for this
            check, unless a loader with `keyed=` has already checked the ids. Without the check, such an id reads and
            trains another row.

    Raises:
        ValueError: Before anything is built: an optimizer, a strategy or a size is invalid. The error gives the reason.
        RuntimeError: The process is in no process group; or FBGEMM has no code for this rank's GPU, such as a T4: use
            `replicate`.
        ImportError: TorchRec or FBGEMM is missing, or of a release that does not fit torch. The error names the package
            to install. The model is not changed.

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

    momentum = None
    if callable(optimizer):
        check_alone(lr, eps)
        dense_optimizer = dense_optimizer or optimizer
        optimizer, lr, eps, momentum = described(optimizer)
    return build(
        model,
        strategies or {},
        batch_size=batch_size,
        optimizer=optimizer,
        lr=LR if lr is None else lr,
        eps=EPS if eps is None else eps,
        momentum=momentum,
        dense_optimizer=dense_optimizer,
        fused=fused,
        memory=memory_bytes,
        compute_kernels=compute_kernels or {},
        topology=topology,
        checked=checked,
    )

"""A model with a copy on every rank, under DistributedDataParallel, with the interface of a sharded one, without
TorchRec."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn.parallel import DistributedDataParallel

from ...devices import collective_device
from ...shm.process_group import shared_group
from . import buffers, checkpoint, growth
from . import optimizer_state as optimizers
from .common_tables import CommonTables, sparse_tables
from .copied_tables import CopiedTables
from .growth import Growth
from .optimizer_choice import MakeOptimizer, check_eps, maker


@dataclass(frozen=True)
class Replicated:
    """A model with a copy on every rank, inside a rank.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.sharding import replicate
        >>> def save_and_load():
        ...     model = torch.nn.Linear(1, 1)
        ...     replicated = replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
        ...     replicated.save("checkpoint")
        ...     replicated.load("checkpoint")
        ...     return replicated.gather()  # a plain module
        >>> in_ddp(2, save_and_load)
        Linear(in_features=1, out_features=1, bias=True)
    """

    model: nn.Module
    """Call it like the model that was given."""
    optimizer: torch.optim.Optimizer
    module: nn.Module
    """The model that was given."""
    _tables: CommonTables | CopiedTables | None = None
    """The tables with sparse gradients, which DistributedDataParallel leaves alone."""

    @property
    def _fused(self) -> bool:
        """False: no table is updated in the backward pass."""
        return False

    @property
    def _ahead(self) -> None:
        """None: every rank stores all rows, so that no ids are sent."""

    def clip_gradients(self, norm: float) -> float:
        """Scale all gradients so that their common norm is at most `norm`.

        Returns:
            Their norm before.
        """
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self._tables is None:
            return float(nn.utils.clip_grad_norm_(every, norm))
        self._tables.exchange()
        dense = [one.grad for one in every if one not in self._tables and one.grad is not None]
        total = float((self._tables.squared_norm() + sum(one.double().square().sum() for one in dense)).sqrt())
        for one in every:
            if one.grad is not None:
                one.grad.mul_(min(1.0, norm / (total + 1e-6)))
        return total

    def gather(self) -> nn.Module | None:
        """Return the model as a plain module, on the CPU of rank 0; None on the other ranks."""
        return copy.deepcopy(self.module).cpu() if dist.get_rank() == 0 else None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`. All ranks must call it."""
        if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
            buffers.share(list(self.module.buffers()))  # any rank's may be written
        checkpoint.save(folder, {"model": self._weights()} | optimizers.state_of([self._named()]))

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True, grow: Growth | None = None) -> None:
        """Load a checkpoint of `save`, on any number of ranks; or weights of such a model from `Sharded.save`.

        Args:
            folder: The folder of `save`.
            optimizer: Whether to load the optimizer's state too. Learning rates are not part of it.
            grow: Table, or parameter, that may have more rows here than in the checkpoint → what part each row of the
                checkpoint has in the new ones: `Vocabulary.unknown_weights` of yesterday's workflow. Its rows stay;
                optimizers know nothing of the new ones yet.

        Raises:
            ValueError: The checkpoint is of another model, or of another optimizer; or a table cannot grow so.
        """
        state: dict[str, Any] = {"model": self._weights()}
        saved = checkpoint.contents(folder)
        growing = growth.resolve(grow or {}, state["model"], saved, folder)
        there = growth.clipped(state, growing)
        if optimizer:
            there |= optimizers.empty_state([self._named()], saved, folder)
        checkpoint.load(folder, there)
        growth.fill_new(state["model"], growing)
        states.set_model_state_dict(self.model, state["model"])
        if optimizer:
            growth.pad_states(there, growing, folder)
            optimizers.set_state([self._named()], there, folder)
            if self._tables is not None:
                self._tables.adopt(self.optimizer)

    def _weights(self) -> dict[str, Any]:
        return dict(states.get_model_state_dict(self.model))

    def _named(self) -> optimizers.Named:
        return self.optimizer, {parameter: name for name, parameter in self.module.named_parameters()}


def replicate(
    model: nn.Module,
    optimizer: str | MakeOptimizer,
    *,
    lr: float | None = None,
    eps: float | None = None,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
) -> Replicated:
    """Put a copy of `model` on every rank, embedding tables included. All ranks must call it.

    Every copy starts with rank 0's values. The gradient of a step is the mean of the ranks' gradients.

    CPU ranks of one machine share tables with `sparse=True` (`nn.Embedding`, `nn.EmbeddingBag`; without `max_norm`):
    the tables and the optimizer's state of their rows are in memory once, each rank updates a part of the rows, and the
    time of a step does not depend on the number of rows. Optimizers for that are torch's Adagrad, SparseAdam, and SGD
    without momentum. On GPUs, several machines, or with a `process_group` such tables are copied, too, and ranks
    exchange the rows of their gradients.

    Args:
        model: Any module, with values. It is moved to the rank's device.
        optimizer: "sgd", "adagrad" or "adam"; or, as for `shard`, what makes an optimizer of parameters, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`: any optimizer will do.
        lr: Learning rate, for an optimizer by name. None: 0.01.
        eps: The number added to the denominator, for optimizers by name that have one. None: 1e-8.
        process_group: The group of the ranks with copies. None: all ranks.
        bucket_cap_mb: MiB of gradients that are sent together. None: torch's choice. This and what follows is for
            `DistributedDataParallel`, which explains it.
        find_unused_parameters: Whether some parameters have no gradient in some steps.
        gradient_as_bucket_view: Whether gradients lie in what is sent, which takes less memory.
        static_graph: Whether each step uses the same parameters.

    Raises:
        ValueError: Something of the model is on the meta device; `optimizer` is no callable and no such name, or is a
            callable and comes with `lr` or `eps`; or it is "adam", and a table says `sparse=True`; or its `eps` is 0 in
            float16, and a parameter is that.
        RuntimeError: Outside a process group.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.sharding import replicate
        >>> def train():
        ...     model = torch.nn.Linear(1, 1)
        ...     replicated = replicate(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        ...     rows = torch.full((4, 1), float(dist.get_rank()))
        ...     replicated.model(rows).square().mean().backward()
        ...     replicated.optimizer.step()
        ...     return replicated.gather()
        >>> in_ddp(2, train)
        Linear(in_features=1, out_features=1, bias=True)
    """
    if not dist.is_initialized():
        raise RuntimeError("replicate() works in a rank: call it in a function that in_ddp or a Session runs")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values to copy: build the model on the CPU")
    make, device = maker(optimizer, lr, eps), collective_device()
    if optimizer == "adam" and (sparse := sparse_tables(model)[0]):
        raise ValueError(
            f"`optimizer` must be sgd, adagrad or a callable where a table says sparse=True, as {next(iter(sparse))} "
            "does, got 'adam': torch has it for dense gradients alone"
        )
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sparse, possible = sparse_tables(model)
    group = None
    if device.type == "cpu" and possible and process_group is None:
        group = process_group = shared_group()
    tables: CommonTables | CopiedTables | None = None
    if sparse and group is not None:
        tables = CommonTables(sparse, group.collectives)
    elif sparse:
        tables = CopiedTables(sparse, process_group)
    parallel = model
    alone = dist.get_world_size(process_group) == 1  # without another rank to exchange gradients with
    if not alone and (tables is None or any(parameter not in tables for parameter in trained)):
        if tables is not None:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(sparse))
        parallel = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        vars(model).pop("_ddp_params_and_buffers_to_ignore", None)  # not for whoever wraps it next
    made = make(trained)
    check_eps(made)
    replicated = Replicated(parallel, made, model, tables)
    if tables is not None:
        tables.attach(replicated.optimizer)
    return replicated

"""A model with a copy on every rank, under DistributedDataParallel, with the interface of a sharded one, without
TorchRec."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn.parallel import DistributedDataParallel

from ...devices import collective_device
from ...shm.process_group import shared_group
from . import buffers, checkpoint, growth, raw_files
from . import optimizer_state as optimizers
from .common_tables import CommonTables, sparse_tables
from .copied_tables import CopiedTables
from .growth import Growth, Renewed
from .optimizer_choice import MakeOptimizer, check_dampening, check_eps, maker
from .raw_tables import RawTables, raw_tables


@dataclass(frozen=True)
class Replicated:
    """A model with a copy on every rank. `replicate` makes it.

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
    """Call the model, like the original model."""
    optimizer: torch.optim.Optimizer
    module: nn.Module
    """The original model."""
    _tables: CommonTables | CopiedTables | None = None
    """The tables with sparse gradients, which DistributedDataParallel leaves alone."""
    _raw: RawTables | None = None
    """The tables of raw ids, whose rows are divided among the ranks."""

    @property
    def _fused(self) -> bool:
        """False: no table is updated in the backward pass."""
        return False

    @property
    def _ahead(self) -> None:
        """None: every rank stores all rows, so no ids are sent."""

    def clip_gradients(self, norm: float) -> float:
        """Scale all gradients so that their common norm is at most `norm`.

        Returns:
            The norm before the scaling.
        """
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        apart = [tables for tables in (self._tables, self._raw) if tables is not None]
        if not apart:
            return float(nn.utils.clip_grad_norm_(every, norm))
        for tables in apart:
            tables.exchange()
        dense = [one.grad for one in every if one.grad is not None and not any(one in tables for tables in apart)]
        squares = [tables.squared_norm() for tables in apart] + [one.double().square().sum() for one in dense]
        total = float(torch.stack(squares).sum().sqrt())
        for one in every:
            if one.grad is not None:
                one.grad.mul_(min(1.0, norm / (total + 1e-6)))
        return total

    def gather(self) -> nn.Module | None:
        """Return the model as a plain module, on the CPU of rank 0; None on the other ranks."""
        whole = raw_files.gather(self._raw) if self._raw is not None else {}
        if dist.get_rank() != 0:
            return None
        # Without the rows, which come after it.
        tables = self._raw.tables.values() if self._raw is not None else ()
        plain = copy.deepcopy(self.module, {id(one.weight): nn.Parameter(one.weight[:0].cpu()) for one in tables}).cpu()
        for path, state in (whole or {}).items():
            table: Any = plain.get_submodule(path)
            table.clear()
            table.add_state(state)
        return plain

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`. All ranks must call it."""
        if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
            buffers.share(list(self.module.buffers()))  # any rank's may be written
        state = {"model": self._weights()} | raw_files.checkpoint_part(self._raw)
        if self._raw is not None:
            raw_files.save(folder, self._raw)
        checkpoint.save(folder, state | optimizers.state_of([self._named()]))

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        grow: Growth | None = None,
        renew: Renewed | None = None,
    ) -> None:
        """Load a checkpoint of `save`, on any number of ranks; or the weights of a checkpoint of `Sharded.save`.

        Args:
            folder: The folder that `save` has written.
            optimizer: Whether to load the optimizer's state, too. Learning rates are not part of the state.
            grow: The tables or parameters that may have more rows here than in the checkpoint. A mapping from the name
                of each to the weights by which its old rows are averaged for the new rows: `Vocabulary.unknown_weights`
                of the workflow that the checkpoint was trained with. Old rows are loaded unchanged; for new rows, the
                optimizer has no state yet.
            renew: A mapping from these names to rows of the checkpoint that start like new rows, because their codes
                stand for other values now: `Vocabulary.renewed` of the new vocabulary.

        Raises:
            ValueError: The checkpoint is of another model or optimizer, or a table cannot grow in this way.
        """
        state: dict[str, Any] = {"model": self._weights()} | raw_files.checkpoint_part(self._raw)
        saved = checkpoint.contents(folder)
        growing = growth.resolve(grow or {}, renew or {}, state["model"], saved, folder)
        there = growth.clipped(state, growing)
        if optimizer:
            there |= optimizers.empty_state([self._named()], saved, folder)
        checkpoint.load(folder, there)
        growth.fill_new(state["model"], growing)
        options = states.StateDictOptions(strict=self._raw is None)  # their rows are not in it
        states.set_model_state_dict(self.model, state["model"], options=options)
        if self._raw is not None:
            raw_files.load(folder, self._raw, int(there[raw_files.PARTS]["files"]), optimizer)
        if optimizer:
            growth.pad_states(there, growing, folder)
            optimizers.set_state([self._named()], there, folder)
            if self._tables is not None:
                self._tables.adopt(self.optimizer)

    def _weights(self) -> dict[str, Any]:
        found = dict(states.get_model_state_dict(self.model))
        if self._raw is None:
            return found
        of_rows = {f"{path}._extra_state".lstrip(".") for path in self._raw.tables}
        return {key: value for key, value in found.items() if key not in of_rows}

    def _named(self) -> optimizers.Named:
        return self.optimizer, {
            parameter: name
            for name, parameter in self.module.named_parameters()
            if self._raw is None or parameter not in self._raw
        }


def _check(model: nn.Module, of_ids: Mapping[str, Any], optimizer: Any, process_group: Any) -> None:
    """Raise an error unless a model can have copies on all ranks."""
    if not dist.is_initialized():
        raise RuntimeError("replicate() works in a rank: call it in a function that in_ddp or a Session runs")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values to copy: build the model on the CPU")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"`model` must have a parameter to train, got {type(model).__name__} without any that requires a gradient: "
            "without training, call the model itself"
        )
    if of_ids and process_group is not None:
        raise ValueError(
            f"`process_group` must be None where a table has raw ids, as {next(iter(of_ids)) or 'the model'} has: its "
            "rows are divided among all ranks"
        )
    if optimizer == "adam" and (sparse := sparse_tables(model)[0]):
        raise ValueError(
            f"`optimizer` must be sgd, adagrad or a callable if a table has sparse=True, as {next(iter(sparse))} has, "
            "got 'adam': torch's Adam accepts only dense gradients"
        )


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
    time of a step does not depend on the number of rows. The optimizer can be torch's Adagrad, SparseAdam, or SGD, with
    momentum, too: the velocity of a row then changes only in steps that use the row. On GPUs, on several machines, or
    with a `process_group`, such tables are copied, too, and ranks exchange the rows of their gradients.

    The rows of a table of raw ids (`RawIds`) are divided among the ranks, with their optimizer's state. torch's SGD,
    Adagrad, Adam and related optimizers, with any options, train the rows that a batch uses and leave other rows
    unchanged. A step removes the gradients of such rows.

    Args:
        model: Any module with values. It is moved to the rank's device.
        optimizer: "sgd", "adagrad" or "adam"; or a function from parameters to any optimizer, such as `lambda
            parameters: torch.optim.Adam(parameters, lr=1e-3)`.
        lr: The learning rate of an optimizer that is given by name. None: 0.01.
        eps: The number added to the denominator by an optimizer that is given by name and has one. None: 1e-8.
        process_group: The group of the ranks with copies. None: all ranks.
        bucket_cap_mb: The number of MiB of gradients that are sent together. None: torch's default. This and the
            following arguments are passed to `DistributedDataParallel`, whose documentation explains them.
        find_unused_parameters: Whether some parameters have no gradient in some steps.
        gradient_as_bucket_view: Whether gradients are views of the memory that is sent, which takes less memory.
        static_graph: Whether each step uses the same parameters.

    Raises:
        ValueError: A part of the model is on the meta device; `optimizer` is neither a callable nor such a name, or is
            a callable together with `lr` or `eps`; it cannot train single rows, and a table has raw ids; it is "adam",
            and a table has `sparse=True`; it has momentum with dampening, and a table has either; or its `eps` is 0 in
            float16, the type of a parameter.
        RuntimeError: The process is in no process group.

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
    of_ids = raw_tables(model)
    _check(model, of_ids, optimizer, process_group)
    make, device = maker(optimizer, lr, eps), collective_device()
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
    raw = RawTables(of_ids, process_group) if of_ids else None
    parallel = model
    alone = dist.get_world_size(process_group) == 1  # without another rank to exchange gradients with
    apart = {*sparse, *(raw.parameters if raw is not None else ())}
    if not alone and any(parameter.requires_grad and name not in apart for name, parameter in model.named_parameters()):
        parallel = _distributed(
            model,
            apart,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
    made = make(trained)
    check_eps(made)
    replicated = Replicated(parallel, made, model, tables, raw)
    for one in (tables, raw):
        if one is not None:
            check_dampening(made, one)
            one.attach(made)
    return replicated


def _distributed(model: nn.Module, apart: Collection[str], **options: Any) -> DistributedDataParallel:
    """Return a model, on this rank's device, whose gradients are averaged over the ranks, except for the parameters in
    `apart`."""
    if apart:
        of_root = {f".{name}" for name in apart if "." not in name}  # torch's names in a model that is a table
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*apart, *of_root])
    device = collective_device()
    parallel = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)
    vars(model).pop("_ddp_params_and_buffers_to_ignore", None)  # not for whoever wraps it next
    return parallel

"""A model whose embedding tables are sharded over the ranks: training, saving, loading, and gathering."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...devices import collective_device
from ..parallel import buffers, checkpoint, growth
from ..parallel import optimizer_state as optimizers
from ..parallel.checkpoint import no_future_warnings
from ..parallel.growth import Growth, Renewed
from .plan import Plan

if TYPE_CHECKING:  # so that this can be imported without TorchRec
    from torchrec.distributed import DistributedModelParallel

    from .batches_ahead import InputsAhead
    from .deferred import TablesOptimizer

#: Bytes of a table that are gathered at once.
BLOCK = 64 << 20


@dataclass(frozen=True)
class Sharded:
    """A model whose tables are sharded over the ranks. `shard` makes it.

    Examples:
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.models import PooledTables
        >>> from nbdist.recsys.sharding import shard
        >>> def sharded(strategy):
        ...     return shard(PooledTables({"user": 100}, embedding_dim=8), {"user": strategy}, batch_size=2)
        >>> def save_and_load():
        ...     sharded("row_wise").save("checkpoint")
        ...     other = sharded("table_wise")
        ...     other.load("checkpoint")
        ...     return other.gather()  # a plain module
        >>> in_ddp(2, save_and_load).embedding_bags["user"].weight.shape
        torch.Size([100, 8])
    """

    model: DistributedModelParallel
    """The model, which is called like the original model; on GPUs also with data on the CPU. Its parameters outside
    tables are data parallel."""
    optimizer: TablesOptimizer
    """The optimizer, whose `step` is called as usual. Fused tables are updated in the backward pass already; `step`
    updates the other tables, the copies of data_parallel tables and the model's other parameters, and applies changed
    learning rates."""
    plan: Plan
    _template: nn.Module
    """The original model, with its parameters on the meta device."""
    _fused: bool = True
    """True if some tables are updated in the backward pass."""
    _ahead: InputsAhead | None = None
    """The sender of the next batch's ids to the ranks that store their rows, for `fit`. None on a single rank."""

    @torch.no_grad()
    def clip_gradients(self, norm: float) -> float:
        """Scale all gradients, including those for tables, so that their norm is at most `norm`. All ranks must call
        it.

        Args:
            norm: The largest norm of the gradients of all parameters together, over the parts of tables on all ranks.

        Returns:
            The norm before the scaling.

        Raises:
            RuntimeError: Tables are fused, and were updated already.

        Examples:
            >>> import torch
            >>> from nbdist import in_ddp
            >>> from nbdist.recsys.models import PooledTables
            >>> from nbdist.recsys.sharding import shard
            >>> def step():
            ...     model = PooledTables({"user": 9}, embedding_dim=4)
            ...     sharded = shard(model, {"user": "row_wise"}, batch_size=1, fused=False)
            ...     sharded.model({"user": torch.tensor([3])}).sum().backward()
            ...     return sharded.clip_gradients(0.5)
            >>> in_ddp(2, step)  # of four gradients that are 1
            2.0
        """
        if self._fused:
            raise RuntimeError(
                "clip_gradients() must know all gradients before tables change, but tables of this model are updated "
                "in "
                "the backward pass: use shard(..., fused=False)"
            )
        waiting = self.optimizer.waiting
        square = torch.zeros((), dtype=torch.float64, device=collective_device())
        for tables in waiting:
            for _, _, gradient in tables.gradients():
                square += gradient.double().square().sum()
        dist.all_reduce(square)
        copies = [p.grad for one, _ in _dense(self.optimizer) for group in one.param_groups for p in group["params"]]
        copies = [gradient for gradient in copies if gradient is not None]
        for gradient in copies:
            square += gradient.double().square().sum()
        total = square.sqrt()
        factor = (norm / (total + 1e-6)).clamp(max=1.0).float()  # as torch's clip_grad_norm_ has it
        for gradient in copies:
            gradient *= factor
        for tables in waiting:
            tables.scale(factor)
        return float(total)

    def gather(self) -> nn.Module | None:
        """Return the whole model as one plain module, on the CPU of rank 0; None on the other ranks.

        All ranks must call it. It needs memory for the whole model on rank 0's machine, and almost none on its GPU.
        """
        on_rank_0 = dist.get_rank() == 0
        whole: dict[str, torch.Tensor] = {}
        for key, value in self._weights().items():
            if not hasattr(value, "local_shards"):
                if on_rank_0:
                    whole[key] = value.detach().to("cpu", copy=True)
                continue
            with no_future_warnings():
                table = _gather_table(value)
            if table is not None:
                whole[key] = table
        if not on_rank_0:
            return None
        plain = copy.deepcopy(self._template)
        trained = dict(self.model.module.named_buffers())
        module: Any
        for module in plain.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
                setattr(module, name, empty)
            if hasattr(module, "_device"):  # of a collection that was made on meta
                module._device = torch.device("cpu")
        for path, module in plain.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                # Those that are not in the state dict come from the trained module, too.
                value = trained.get(f"{path}.{name}".lstrip("."), buffer)
                setattr(module, name, value.detach().cpu().clone())
        plain.load_state_dict(whole, assign=True)  # and no copy
        return plain

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`. All ranks must call it."""
        share_buffers(self.model, [name for name, _ in self._template.named_buffers()])  # any rank's may be written
        state = {"model": self._weights(), "steps": _steps(self.optimizer)} | self._fused_state()
        checkpoint.save(folder, state | optimizers.state_of(_dense(self.optimizer)))

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        grow: Growth | None = None,
        renew: Renewed | None = None,
    ) -> None:
        """Load a checkpoint of `save`, on any number of ranks and with any strategies. All ranks must call it.

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
            ValueError: The checkpoint has different tables, the optimizer's state does not fit these strategies, or a
                table cannot grow in this way.
        """
        dense = _dense(self.optimizer)
        saved = checkpoint.contents(folder)
        with no_future_warnings():
            state: dict[str, Any] = {"model": self._weights()}
            growing = growth.resolve(grow or {}, renew or {}, state["model"], saved, folder)
            if optimizer:
                state |= {"steps": _steps(self.optimizer)} | self._fused_state()
            there = growth.clipped(state, growing)
            if optimizer:
                there |= optimizers.empty_state(dense, saved, folder)
            checkpoint.load(folder, there)
            growth.fill_new(state["model"], growing)
            self.model.load_state_dict(state["model"])
        if optimizer:
            growth.pad_states(there, growing, folder)
            growth.renew_states({"optimizer": there.get("optimizer", {})}, growing)
            optimizers.set_state(dense, there, folder)
            from .deferred import counters

            for kernel in kernels(self.optimizer):
                for counter in counters(kernel):
                    counter.fill_(int(there["steps"]))

    def _weights(self) -> dict[str, Any]:
        with no_future_warnings():
            return dict(self.model.state_dict())

    def _fused_state(self) -> dict[str, Any]:
        """Return the state of the tables' optimizers, without param_groups, which name other parameters on each
        rank."""
        with no_future_warnings():
            states = [one.state_dict()["state"] for one in self.optimizer.of_tables]
        moments = {key: value for state in states for key, value in state.items()}
        if any(tables.momentum for tables in self.optimizer.waiting):  # which Adagrad's state must not become
            moments = {
                key: {name.replace("momentum1", "momentum_buffer"): one for name, one in value.items()}
                for key, value in moments.items()
            }
        return {"optimizer": moments} if moments else {}  # not an empty part, which no other rank may have


def share_buffers(model: DistributedModelParallel, names: Iterable[str]) -> None:
    """Copy rank 0's buffers to all ranks, by their names in the model before it was sharded."""
    buffers.share([model.module.get_buffer(name) for name in names])


def kernels(optimizer: Any) -> Iterator[Any]:
    """Yield FBGEMM's modules of this rank that store and update tables. The model does not list them."""
    for _, inner in getattr(optimizer, "optimizers", ()):
        yield from kernels(inner)
    if hasattr(optimizer, "_emb_module"):
        yield optimizer._emb_module


def _steps(optimizer: TablesOptimizer) -> torch.Tensor:
    """Return the step count of the fused Adam and LAMB for their bias correction, which FBGEMM's state lacks."""
    count = torch.tensor(
        max((int(kernel.iter) for kernel in kernels(optimizer)), default=0), device=collective_device()
    )
    dist.all_reduce(count, op=dist.ReduceOp.MAX)  # some ranks may hold no table
    return count.cpu()


def _dense(optimizer: TablesOptimizer) -> list[optimizers.Named]:
    """Return the optimizers of the parameters with a copy on every rank: dense layers, data_parallel tables."""
    return [
        (one._optimizer, {parameter: name for name, parameter in one.params.items()}) for one in optimizer.of_copies
    ]


def _gather_table(value: Any) -> torch.Tensor | None:
    """Return a sharded table on the CPU of rank 0; None on the other ranks.

    The table is sent in blocks: a GPU may not have memory for the whole table in addition to a rank's part.
    """
    rank, device = dist.get_rank(), collective_device()
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
    whole = torch.empty(value.size(), dtype=value.dtype) if rank == 0 else None
    for part in value.metadata().shards_metadata:
        (row, column), (rows, columns), owner = part.shard_offsets, part.shard_sizes, part.placement.rank()
        step = max(1, BLOCK // (columns * value.dtype.itemsize))
        for start in range(0, rows, step):
            size = min(step, rows - start)
            block = None
            if rank == owner:
                block = own[row, column][start : start + size].detach()
                if owner != 0:
                    dist.send(block.to(device).contiguous(), 0)
            elif rank == 0:
                block = torch.empty(size, columns, dtype=value.dtype, device=device)
                dist.recv(block, owner)
            if whole is not None and block is not None:
                whole[row + start : row + start + size, column : column + columns] = block
    return whole

"""The attributes that fastai and accelerate read of a data loader, for loaders that divide rows among ranks."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from ...devices import collective_device
from ..io.partition import Partition
from ..io.remaining_epoch import RemainingEpoch


class Adapter:
    """A base of loaders: the attributes that fastai's `DataLoaders` and `Learner` use."""

    sharded = True
    """Says that the rows are divided among the ranks already: nbdist's `distrib_ctx` leaves such a loader alone."""

    batch_size: int
    shuffle: bool
    remainder: str
    _device: torch.device | None
    _epoch: int
    _step: int
    _start: int
    _rest: RemainingEpoch | None

    @property
    def rows(self) -> int:
        """Rows of the whole input, over all ranks."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """Whose rows these are."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of ranks that the rows are divided among."""
        raise NotImplementedError

    @property
    def partition(self) -> Partition:
        """The assignment of rows to ranks and steps."""
        return Partition(self.rows, self.world_size, self.batch_size, self.remainder)

    @property
    def bs(self) -> int:
        """`batch_size`, by fastai's name."""
        return self.batch_size

    @property
    def drop_last(self) -> bool:
        """True where rows that do not fill a batch on every rank are left out."""
        return self.remainder == "drop"

    @property
    def dataset(self) -> range:
        """The numbers of all rows: ``len(loader.dataset)`` is how many there are."""
        return range(self.rows)

    @property
    def device(self) -> torch.device:
        """The device of batches."""
        if self._device is not None:
            return self._device
        return collective_device() if dist.is_available() and dist.is_initialized() else torch.device("cpu")

    def to(self, device: torch.device | str | int | None) -> Self:
        """Give batches out on `device`; None: where the ranks compute, or on the CPU without ranks."""
        chosen = None if device is None else torch.device(device)
        if chosen == torch.device("cuda"):  # without a number
            chosen = torch.device("cuda", torch.cuda.current_device())
        self._device = chosen
        return self

    def new(self, *, shuffle: bool | None = None, drop_last: bool | None = None, **_: Any) -> Self:
        """A loader of the same rows at its beginning, in another order or with other rows left out.

        fastai asks for one to predict with, and gives arguments of its own loaders, which mean nothing here.
        """
        other = copy.copy(self)
        other.shuffle = self.shuffle if shuffle is None else shuffle
        if drop_last is not None and drop_last != self.drop_last:
            other.remainder = "drop" if drop_last else "keep"
        other._epoch = other._step = other._start = 0
        other._rest = None
        return other

    def get_idxs(self) -> Tensor:
        """The row that each of the results gathered by `to_detach` is of, shape (rows,); fastai sorts by it."""
        partition = self.partition
        if self.shuffle or partition.world_size == 1:
            return torch.arange(partition.rows)  # as they come
        parts = [
            torch.arange(
                partition.batch_start(rank, step),
                partition.batch_start(rank, step) + partition.size_without_repeats(rank, step),
            )
            for step in range(partition.steps)
            for rank in range(partition.world_size)
        ]
        return torch.cat(parts)

    def to_detach(self, b: Any, cpu: bool = True, gather: bool = True) -> Any:
        """fastai's `to_detach`, for results of the batch given last: gathered from all ranks, each row once.

        fastai's own takes it for granted that all ranks have equally many rows, and hangs or mixes them up if not. A
        number, such as a loss, becomes the mean over all rows of the step. fastai weighs the steps of an epoch by the
        rank's own rows: where ranks decide by such a mean (early stopping), ``remainder="pad"`` makes it the same.
        """
        from fastai.torch_core import apply, maybe_gather

        partition, step = self.partition, max(self._step - 1, 0)

        def detach(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x.detach()
            if gather and self.world_size > 1 and dist.is_initialized():
                if x.ndim == 0:
                    x = _mean(maybe_gather(x[None]), partition, step)
                elif len(x) == partition.size(self.rank, step):
                    x = _rows(maybe_gather(_padded(x, partition, step)[None]), partition, step)
                else:  # not one result per row
                    x = maybe_gather(x)
            return x.cpu() if cpu else x

        return apply(detach, b)


def _padded(x: Tensor, partition: Partition, step: int) -> Tensor:
    """Results of one step, shape (rows of this rank, ...), with as many rows as any rank has."""
    most = max(partition.size(rank, step) for rank in range(partition.world_size))
    return torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])


def _rows(everyone: Tensor, partition: Partition, step: int) -> Tensor:
    """All ranks' padded results, shape (ranks, rows, ...), one after the other, without results of repeated rows."""
    return torch.cat([one[: partition.size_without_repeats(rank, step)] for rank, one in enumerate(everyone)])


def _mean(everyone: Tensor, partition: Partition, step: int) -> Tensor:
    """The mean over all rows of a step, from each rank's mean over its rows."""
    sizes = everyone.new_tensor([partition.size(rank, step) for rank in range(partition.world_size)])
    return (everyone * sizes).sum() / sizes.sum()


class _Progress:
    """The attributes that accelerate's `GradientState` reads: `accumulate` takes a step at the end of the loader."""

    end_of_dataloader = False
    remainder = 0  # rows that gather_for_metrics is to keep of the last step; 0: all


@contextlib.contextmanager
def known_to_accelerate() -> Iterator[_Progress]:
    """Lets accelerate, if it is in use, know that a loader is iterated over; set `end_of_dataloader` at its end."""
    progress = _Progress()
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state:
        yield progress
        return
    state = module.GradientState()
    state._add_dataloader(progress)
    try:
        yield progress
    finally:
        state._remove_dataloader(progress)

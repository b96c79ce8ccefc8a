"""The attributes of a data loader that fastai and accelerate read, for loaders that divide rows among ranks."""

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
    """A mark that the rows are already divided among the ranks: nbdist's `distrib_ctx` does not change such a
    loader."""

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
        """The number of rows of the whole input, over all ranks."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """The rank whose rows the loader yields."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """The number of ranks among which the rows are divided."""
        raise NotImplementedError

    @property
    def partition(self) -> Partition:
        """The assignment of rows to ranks and steps."""
        return Partition(self.rows, self.world_size, self.batch_size, self.remainder)

    @property
    def bs(self) -> int:
        """The `batch_size`, under fastai's name."""
        return self.batch_size

    @property
    def drop_last(self) -> bool:
        """True if the last rows are left out when they do not fill a batch on every rank."""
        return self.remainder == "drop"

    @property
    def dataset(self) -> range:
        """The numbers of all rows, so that ``len(loader.dataset)`` is their number."""
        return range(self.rows)

    @property
    def device(self) -> torch.device:
        """The device of batches."""
        if self._device is not None:
            return self._device
        return collective_device() if dist.is_available() and dist.is_initialized() else torch.device("cpu")

    def to(self, device: torch.device | str | int | None) -> Self:
        """Yield batches on `device`; None: the device of the ranks, or the CPU without ranks."""
        chosen = None if device is None else torch.device(device)
        if chosen == torch.device("cuda"):  # without a number
            chosen = torch.device("cuda", torch.cuda.current_device())
        self._device = chosen
        return self

    def new(self, *, shuffle: bool | None = None, drop_last: bool | None = None, **_: Any) -> Self:
        """Return a loader of the same rows at its start, with a different order or another treatment of remaining rows.

        fastai calls this for predictions, with arguments of its own loaders, which have no effect here.
        """
        other = copy.copy(self)
        other.shuffle = self.shuffle if shuffle is None else shuffle
        if drop_last is not None and drop_last != self.drop_last:
            other.remainder = "drop" if drop_last else "keep"
        other._epoch = other._step = other._start = 0
        other._rest = None
        return other

    def get_idxs(self) -> Tensor:
        """Return the row number of each result that `to_detach` has gathered, shape (rows,). fastai sorts the
        results by these numbers.
        """
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
        """Replace fastai's `to_detach` for results of the last batch: gather them from all ranks, each row once.

        fastai's own function assumes that all ranks have the same number of rows; otherwise it hangs or mixes rows up.
        A number, such as a loss, becomes the mean over all rows of the step. But fastai weights the steps of an epoch
        by the rank's own number of rows. If ranks decide by the mean of an epoch (early stopping), use
        ``remainder="pad"``: then it is equal on all ranks.
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
    """Pad results of one step, shape (rows of this rank, ...), to the largest number of rows of any rank."""
    most = max(partition.size(rank, step) for rank in range(partition.world_size))
    return torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])


def _rows(everyone: Tensor, partition: Partition, step: int) -> Tensor:
    """Join all ranks' padded results, shape (ranks, rows, ...), without the results of padding and of repeated rows."""
    return torch.cat([one[: partition.size_without_repeats(rank, step)] for rank, one in enumerate(everyone)])


def _mean(everyone: Tensor, partition: Partition, step: int) -> Tensor:
    """Return the mean over all rows of a step, from each rank's mean over its rows."""
    sizes = everyone.new_tensor([partition.size(rank, step) for rank in range(partition.world_size)])
    return (everyone * sizes).sum() / sizes.sum()


class _Progress:
    """The attributes that accelerate's `GradientState` reads: at the end of the loader, `accumulate` makes a step."""

    end_of_dataloader = False
    remainder = 0  # rows that gather_for_metrics is to keep of the last step; 0: all


@contextlib.contextmanager
def known_to_accelerate() -> Iterator[_Progress]:
    """Register an iteration with accelerate, if it is in use; set `end_of_dataloader` at its end."""
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

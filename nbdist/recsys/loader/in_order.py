"""Batches in the order of the rows: the rows of a step, on all ranks together, follow the rows of the step before."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..io.partition import Partition
from .batches import Window
from .columns import Columns
from .loaders import MemoryLoader


@dataclass(frozen=True)
class InOrder(Partition):
    """A division of an epoch into steps of consecutive rows. Steps have almost equal numbers of rows, at most
    `batch_size` on all ranks together.

    The rows of a step do not depend on the number of ranks. A rank has a position for each of its rows, step
    after step.

    Raises:
        ValueError: A step has fewer rows than there are ranks.
    """

    def __post_init__(self) -> None:
        if min(self.rows, self.batch_size) > 0 and self.rows // self.steps < self.world_size:
            raise ValueError(
                f"each step must have a row for each of {self.world_size} ranks, got {self.rows} rows in steps of at "
                f"most {self.batch_size}: use fewer ranks, or a larger batch_size"
            )
        super().__post_init__()

    @property
    def steps(self) -> int:
        """Number of batches, equal on every rank."""
        return -(-self.rows // self.batch_size)

    def rows_of(self, rank: int, step: int) -> range:
        """Return the range of a step's rows that `rank` has."""
        start, stop = (self.rows * one // self.steps for one in (step, step + 1))
        return range(*(start + (stop - start) * one // self.world_size for one in (rank, rank + 1)))

    def size(self, rank: int, step: int) -> int:
        """Number of rows in batch `step` of `rank`."""
        return len(self.rows_of(rank, step))

    def span(self, rank: int) -> tuple[int, int]:
        """Return the range of positions of `rank`, one for each of its rows."""
        return 0, _starts(self, rank)[-1]

    def batch_starts(self, rank: int, steps: range) -> list[int]:
        """Return the first positions of some steps."""
        return _starts(self, rank)[steps.start : steps.stop]


@functools.lru_cache(maxsize=4)
def _starts(division: InOrder, rank: int) -> list[int]:
    """Return the first position of each step of a rank, and the end of its last step."""
    sizes = (division.size(rank, step) for step in range(division.steps))
    return list(itertools.accumulate(sizes, initial=0))


class InOrderLoader(MemoryLoader):
    """Batches from memory, in the order of the rows, for training on a stream.

    Args:
        data: As for `MemoryLoader`.
        batch_size: The largest number of rows of a step, on all ranks together. Steps have almost equal numbers of
            rows.
        keyed: As for `Loader`.
    """

    def __init__(self, data: Any, batch_size: int, *, keyed: Sequence[str] = ()) -> None:
        super().__init__(data, batch_size, keyed=keyed, seed=0)

    @property
    def partition(self) -> Partition:
        """The assignment of rows to ranks and steps."""
        return InOrder(self.rows, self.world_size, self.batch_size)

    def _everything(self, table: Columns, partition: Partition, rank: int, epoch: int) -> Window:
        assert isinstance(partition, InOrder)
        parts = [partition.rows_of(rank, step) for step in range(partition.steps)]
        return Window(0, table, torch.cat([torch.arange(one.start, one.stop, device=self.device) for one in parts]))

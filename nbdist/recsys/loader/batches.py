"""Batches that are gathered in blocks from rows in memory, and yielded one by one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..io.partition import Partition
from .columns import Column, Columns, Ragged, bytes_of, join, rows_of, split, take
from .keyed import Keyed

BLOCK_BATCHES = 1024  # that are made at once, at most
BLOCK_BYTES = 1 << 22  # bytes that are gathered, pinned and copied in one go; a batch that is larger goes alone
GPU_BLOCK_BYTES = 1 << 26  # that are gathered on a GPU in one go


class Block(NamedTuple):
    """Consecutive batches in one piece: gathered, pinned and copied together, yielded one by one."""

    columns: Columns
    boundaries: list[int]
    """The rows at which the batches begin, and the end of the last one."""
    value_boundaries: dict[str, list[int]]
    """The positions in each list column's values at which batches begin; known before the block goes to a GPU."""
    keyed: Keyed | None = None
    """The keyed jagged tensors of the batches."""

    @classmethod
    def make(cls, columns: Columns, boundaries: list[int]) -> Block:
        """Make a block from `columns`, divided into batches at `boundaries`."""
        value_boundaries = {k: c.offsets[boundaries].tolist() for k, c in columns.items() if isinstance(c, Ragged)}
        return cls(columns, boundaries, value_boundaries)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Block:
        """Return the block with `fn` applied to each tensor; `fn` must not change values."""
        columns: Columns = {}
        for name, column in self.columns.items():
            columns[name] = Ragged(*map(fn, column)) if isinstance(column, Ragged) else fn(column)
        return self._replace(columns=columns, keyed=self.keyed.map(fn) if self.keyed else None)

    def key(self, keys: Sequence[str], pinned: bool = False) -> Block:
        """Return the block with keyed jagged tensors of some columns, in page-locked memory if `pinned`."""
        return self._replace(keyed=Keyed.make(self.columns, self.boundaries, keys, pinned))

    def batches(self) -> Iterator[Columns]:
        """Iterate over the batches. They are views of the block unless something must be computed."""
        each = [self._parts(name, column) for name, column in self.columns.items()]
        for i, parts in enumerate(zip(*each, strict=True)):
            batch = dict(zip(self.columns, parts, strict=True))
            yield self.keyed.batch(i, batch) if self.keyed else batch

    def _parts(self, name: str, column: Column) -> Iterable[Column]:
        """Return the part of a column in each batch."""
        if not isinstance(column, Ragged):
            return split(column, self.boundaries)
        starts = self.value_boundaries[name]
        offsets = (
            column.offsets[start : stop + 1] - low
            for (start, stop), low in zip(itertools.pairwise(self.boundaries), starts[:-1], strict=True)
        )
        return map(Ragged, split(column.values, starts), offsets)


class Window(NamedTuple):
    """Rows in memory, and the row numbers for the positions from `start` on."""

    start: int
    table: Columns
    order: Tensor
    """The row numbers, integers, shape (positions,)."""


def blocks(
    windows: Iterable[Window], partition: Partition, rank: int, step: int, pinned: bool = False
) -> Generator[Block, None, None]:
    """Yield blocks of batches of `rank` from `step` on, from consecutive windows.

    Args:
        windows: The rows, in consecutive windows.
        partition: The division of the rows among ranks and steps.
        rank: The rank whose batches are made.
        step: The number of the first batch.
        pinned: Whether batches that are gathered on the CPU are in page-locked memory.
    """
    begun: list[Columns] = []  # of a batch that ends in a later window
    for window in windows:
        table, order = window.table, window.order
        end = window.start + len(order)
        most = GPU_BLOCK_BYTES if order.device.type == "cuda" else BLOCK_BYTES
        rows = max(1, most * rows_of(next(iter(table.values()))) // max(1, sum(map(bytes_of, table.values()))))
        at_once = min(max(1, rows // partition.batch_size), BLOCK_BATCHES)
        while True:
            # Of the block's batches, and the end of the last one; of those that end here.
            starts = partition.batch_starts(rank, range(step, min(step + at_once, partition.steps) + 1))
            starts = starts[: max(1, bisect.bisect_right(starts, end))]
            start = max(starts[0], window.start)
            stop = starts[-1] if len(starts) > 1 else end
            rest = order[start - window.start : max(start, stop) - window.start]
            if len(rest):
                begun.append({name: take(column, rest, pinned) for name, column in table.items()})
            if len(starts) == 1:
                break
            columns = {name: join([part[name] for part in begun]) for name in table}
            begun = []
            boundaries = [one - starts[0] for one in starts]
            step += len(starts) - 1
            yield Block.make(columns, boundaries)
            del columns
        # Before the next window is read: it may take as much memory as this one.
        del window, table, order, rest

"""The ids of batches in one piece, in TorchRec's format, made block by block in the loader's thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .columns import Batch, Columns, KeyedIds, Ragged, empty_like, split

_MOST = torch.iinfo(torch.int32).max


class Keyed(NamedTuple):
    """The `KeyedIds` of some consecutive batches in one piece."""

    keys: list[str]
    values: Tensor
    """The ids, int32, shape (ids,): batch after batch, and within each batch key after key."""
    lengths: Tensor
    """The lengths of the lists, int32, shape (rows * keys,), in the same order."""
    counts: list[list[int]]
    """The number of ids of each key, for each batch. It is known before the block goes to a GPU."""
    starts: list[int]
    """The first position of each batch among the ids, and the end of the last batch."""
    rows: list[int]
    """The first position of each batch among the lengths, and the end of the last batch."""
    limits: list[dict[str, tuple[int, int]]]
    """The smallest and the largest id of each key that has any, for each batch."""

    @classmethod
    def make(cls, columns: Columns, boundaries: Sequence[int], keys: Sequence[str], pinned: bool = False) -> Keyed:
        """Make the ids of batches that begin at these rows. `pinned`: they are in page-locked memory.

        Raises:
            ValueError: A column is not of integers, has a different shape, or has an id of more than 31 bits.
        """
        values: list[list[Tensor]] = []  # of each key, of each batch
        lengths: list[list[Tensor]] = []
        rows = [stop - start for start, stop in itertools.pairwise(boundaries)]
        limits: list[dict[str, tuple[int, int]]] = [{} for _ in rows]
        for key in keys:
            ids, sizes, ends = _of_column(key, columns, boundaries)
            parts = split(ids, ends)
            some = [number for number, part in enumerate(parts) if len(part)]
            extremes = torch.stack([torch.stack(parts[number].aminmax()) for number in some]).tolist() if some else []
            for number, (low, high) in zip(some, extremes, strict=True):
                limits[number][key] = low, high
                if low < -_MOST or high > _MOST:
                    wrong = high if high > _MOST else low
                    raise ValueError(f"`keyed` must name columns of ids below 2**31, got {key!r} with the id {wrong}")
            values.append(list(ids.int().split([len(part) for part in parts])))
            lengths.append(list(sizes.split(rows)))
        counts = [[len(each[i]) for each in values] for i in range(len(rows))]
        return cls(
            list(keys),
            _joined([each[i] for i in range(len(rows)) for each in values], pinned),
            _joined([each[i] for i in range(len(rows)) for each in lengths], pinned),
            counts,
            list(itertools.accumulate(map(sum, counts), initial=0)),
            list(boundaries),
            limits,
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> Keyed:
        """Return a copy with `fn` applied to each tensor; `fn` must not change values."""
        return self._replace(values=fn(self.values), lengths=fn(self.lengths))

    def batch(self, i: int, columns: Columns) -> Batch:
        """Return batch i, which has these columns."""
        (first, last), (row, end), width = self.starts[i : i + 2], self.rows[i : i + 2], len(self.keys)
        values, lengths = self.values[first:last], self.lengths[row * width : end * width]
        return Batch(columns, KeyedIds(self.keys, values, lengths, self.counts[i], end - row, self.limits[i]))


def _joined(parts: list[Tensor], pinned: bool) -> Tensor:
    return torch.cat(parts, out=empty_like(parts[0], sum(map(len, parts)), pinned))


def _of_column(key: str, columns: Columns, boundaries: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Return a column's ids, the number of ids in each row, and the position of the first id of each batch."""
    column = columns[key]
    ids = column.values if isinstance(column, Ragged) else column
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"`keyed` must name columns with an integer, or a list of integers, in each row, got {key!r}, {ids.dtype} "
            f"of shape {tuple(ids.shape)}"
        )
    if ids.dtype in (torch.uint16, torch.uint32, torch.uint64):  # for which torch has few kernels
        ids = ids.long()
    if isinstance(column, Ragged):
        return ids, column.lengths.int(), column.offsets[torch.as_tensor(boundaries)].tolist()
    return ids, torch.ones_like(ids, dtype=torch.int32), list(boundaries)

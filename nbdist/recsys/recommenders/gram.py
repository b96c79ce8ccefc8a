"""Counts of the users who took both of two items, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ranks
from ..loader.columns import Ragged
from .best import blocks
from .interactions import part_of, sums_of, transposed

_BLOCK = 1 << 25
"""The largest number of elements of a dense matrix that is in memory."""


def columns_of_gram(taken: Ragged, items: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the number of users who took both of two items, for some items at a time with all items.

    Each rank counts a part of the users. All ranks must iterate to the end.

    Yields:
        The codes of some items, and the counts, float32, shape (all items, these items).
    """
    users = torch.arange(len(taken.lengths))
    mine = part_of(taken, users[ranks.rank() :: ranks.world_size()])
    by_item = transposed(mine, items)
    for places in blocks(items, max(1, _BLOCK // max(1, len(mine.lengths)))):
        part = part_of(by_item, places)
        dense = torch.zeros(max(1, len(mine.lengths)), len(places))
        dense[part.values, torch.arange(len(places)).repeat_interleave(part.lengths)] = 1.0
        counts = sums_of(by_item, dense)
        if ranks.world_size() > 1:
            dist.all_reduce(counts)
        yield places, counts

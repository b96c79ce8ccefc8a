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
"""Numbers of a dense block that are in memory at a time."""


def columns_of_gram(taken: Ragged, items: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of some items, and for each of them and all items the number of users who took both.

    Each rank counts for users of its own. All ranks have to go on to the end.

    Yields:
        Places of items, and counts, float32, shape (items, places).
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

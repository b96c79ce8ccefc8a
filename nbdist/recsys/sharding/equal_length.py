"""Loops over loaders with different lengths, in which no rank waits in a collective forever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from ...devices import collective_device

T = TypeVar("T")


def equal_steps(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches of this rank, up to the number of batches of the rank with the fewest. Other batches are
    dropped.

    A rank with one batch more than the others would wait forever in its collectives. So before each batch, the ranks
    check that all of them have one. All ranks must iterate to the end, and none may leave the loop early. Batches may
    differ in size between ranks, so a rank's last batch may be smaller than the last batches of other ranks.

    Args:
        batches: This rank's loader, of any length, which may be unknown.

    Yields:
        The batches, unchanged.

    Examples:
        >>> import torch.distributed as dist
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.sharding import equal_steps
        >>> def steps():
        ...     batches = range(5 if dist.get_rank() == 0 else 3)  # of a loader of the rank's own
        ...     return len(list(equal_steps(batches)))
        >>> in_ddp(2, steps)
        3
    """
    device = collective_device()
    iterator = iter(batches)
    while True:
        batch, there = None, torch.ones(1, dtype=torch.int32, device=device)
        try:
            batch = next(iterator)
        except StopIteration:
            there.zero_()
        dist.all_reduce(there, op=dist.ReduceOp.MIN)
        if not there.item():
            return
        yield batch  # type: ignore[misc]

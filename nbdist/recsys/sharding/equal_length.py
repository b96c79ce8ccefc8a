"""Ranks whose loaders differ in length: what keeps their collectives in step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from ...devices import collective_device

T = TypeVar("T")


def equal_steps(batches: Iterable[T]) -> Iterator[T]:
    """The batches of this rank, as many as the rank with the fewest has; the rest is dropped.

    A rank with a batch more than the others would wait for ever in its collectives. Before each batch the ranks
    agree whether all have one. All ranks have to go through it to the end, and may not leave the loop early on their
    own. Batches may differ in size over the ranks: nothing of the last one is lost as long as each rank has one.

    Args:
        batches: This rank's loader, of any length; it need not know its length.

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

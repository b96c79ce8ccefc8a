"""Collectives for many small tensors at once, such as buffers, in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...shm.process_group import SharedGroup


@torch.no_grad()
def share(buffers: Sequence[torch.Tensor]) -> None:
    """Copy rank 0's values to all ranks, in one message for each dtype. All ranks must call it."""
    for flat in _flattened(buffers):
        dist.broadcast(flat, src=0)


@torch.no_grad()
def average(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Replace the float tensors of all ranks by their mean. All ranks must call it."""
    if isinstance(group, SharedGroup) and all(tensor.is_contiguous() for tensor in tensors):
        group.collectives.mean_(*tensors)
        return
    for flat in _flattened(tensors):
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)


def _flattened(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flatten tensors into one tensor per dtype. At the end of the block, the values are copied back."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        some = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in some])
        yield flat
        for tensor, values in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
            tensor.copy_(values.view_as(tensor))

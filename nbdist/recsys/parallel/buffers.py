"""Buffers, such as the running means of batch norm: each rank's own rows change them, and rank 0's are the model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


@torch.no_grad()
def share(buffers: Sequence[torch.Tensor]) -> None:
    """Give all ranks the values of rank 0, in one message for each dtype. All ranks have to call it."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        some = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.flatten() for buffer in some])
        dist.broadcast(flat, src=0)
        for buffer, values in zip(some, flat.split([buffer.numel() for buffer in some]), strict=True):
            buffer.copy_(values.view_as(buffer))

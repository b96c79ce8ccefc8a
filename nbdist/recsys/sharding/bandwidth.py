"""Measured bandwidths: of ranks reading rows of tables, and of ranks sending to each other.

TorchRec's planner uses these to compare strategies. Its own defaults are for a data center: 51 GB/s of memory, 600 GB/s
between the ranks of a machine.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

#: A table of 32 MB, which a core's own caches do not hold, and how many of its rows are read: 4 MB.
_ROWS, _COLUMNS, _READ = 1 << 17, 64, 1 << 14
#: Bytes that a rank sends to all together.
_SENT = 4 << 20
#: By how much all of that is more on a GPU, which is faster, and begins as late.
_ON_GPU = 16
_TURNS = 3


@dataclass(frozen=True)
class Bandwidth:
    """The bytes per second of a rank while all ranks measure, rounded to a power of two so that noise does not change
    plans."""

    memory: float
    """The bytes per second when random rows are read and written contiguously; both are counted."""
    ranks: float
    """The bytes per second that a rank sends to all ranks, including itself."""


#: Process group → type of device → what was measured.
measured: WeakKeyDictionary[Any, dict[str, Bandwidth]] = WeakKeyDictionary()


def measure(device: torch.device, group: Any) -> Bandwidth:
    """Measure, once for a process group, in some 50 ms. All ranks must call this function, and get the same result.

    Args:
        device: The device of the tables.
        group: The process group that exchanges the rows. None: the default group.
    """
    known = measured.setdefault(group or dist.group.WORLD, {})
    all_know = torch.tensor(int(device.type in known), device=device)  # a rank may have been interrupted
    dist.all_reduce(all_know, dist.ReduceOp.MIN, group=group)
    if not all_know:
        known[device.type] = _measure(device, group)
    return known[device.type]


def _measure(device: torch.device, group: Any) -> Bandwidth:
    more, size = _ON_GPU if device.type == "cuda" else 1, dist.get_world_size()
    table = _ones(more * _ROWS * _COLUMNS, device).view(-1, _COLUMNS)
    read = _ones(more * _READ * _COLUMNS, device).view(-1, _COLUMNS)
    rows = torch.arange(len(read), device=device) * 40_503 % len(table)
    sent, received = (_ones(more * _SENT // 4 // size * size, device) for _ in range(2))
    seconds = torch.tensor(
        [
            _seconds(lambda: torch.index_select(table, 0, rows, out=read), device, group),
            _seconds(lambda: dist.all_to_all_single(received, sent, group=group), device, group),
        ],
        device=device,
    )
    dist.all_reduce(seconds, group=group)
    reading, sending = (seconds / size).tolist()
    return Bandwidth(_rounded(2 * read.nbytes / reading), _rounded(sent.nbytes / sending))


def _ones(count: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.ones(count, device=device)
    # Not by malloc, which would take tables that are made later from what it keeps of this.
    return torch.frombuffer(mmap.mmap(-1, count * 4), dtype=torch.float32).fill_(1.0)


def _seconds(action: Callable[[], Any], device: torch.device, group: Any) -> float:
    """Return the shortest time of several runs, not counting a first run."""
    taken = []
    for _ in range(_TURNS + 1):
        dist.barrier(group=group)
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _rounded(value: float) -> float:
    return 2.0 ** round(math.log2(value))

"""Work on big memory: the layout of buffers, and its division among several threads."""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from .cores import usable_cores

P = TypeVar("P")
R = TypeVar("R")

_ALIGNMENT = 64  # what numpy and torch want of a buffer's address
_BIG = 1 << 20  # bytes from which on memory is mapped: it goes back to the system as soon as it is freed
_MOST_THREADS = 4  # the memory is no faster for more


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return aligned starts for consecutive buffers of these sizes in bytes, and the end of the last one."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def own_memory(size: int) -> memoryview:
    """Allocate memory for one buffer, which lives as long as a view of it and keeps nothing else alive."""
    if size >= _BIG:
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory = bytearray(size + _ALIGNMENT)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _ALIGNMENT
    return memoryview(memory)[start : start + size]


def pieces(size: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each piece, which has at most `largest` bytes."""
    for start in range(0, size, largest):
        yield start, min(largest, size - start)


def by_threads(action: Callable[[P], R], work: list[P]) -> list[R]:
    """Call `action` for each piece of work, with one thread for each core, at most four."""
    if len(work) < 2:
        return [action(piece) for piece in work]
    with concurrent.futures.ThreadPoolExecutor(min(len(usable_cores()), _MOST_THREADS)) as pool:
        return list(pool.map(action, work))

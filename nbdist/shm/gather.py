"""The exchange of arrays of any length from each CPU rank to all ranks: written once into shared memory, and read
there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .collectives import SharedCollectives, as_bytes, padded


class SharedGather:
    """An exchange of arrays between CPU ranks of one machine. All ranks must make one, and call it in the same order.

    Args:
        collectives: The collectives of these ranks.
        count: The number of arrays of each rank.
    """

    def __init__(self, collectives: SharedCollectives, count: int) -> None:
        self._collectives = collectives
        self._count, self._head = count, padded(8 * count)  # bytes, for the lengths of a rank's arrays
        self._make_room(self._head)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Return the arrays of each rank, by rank. They are valid until this rank's next collective.

        Args:
            arrays: The arrays. Between ranks, each may differ only in the first dimension.
        """
        me, mine = self._collectives.rank, [len(one) for one in arrays]
        while True:
            # With the next turn comes the other half of the memory, which some write to while others read this one. Who
            # comes back to this has met all of them there, after they had read.
            half = self._collectives.turns % 2
            self._lengths[half, me] = mine
            if self._needed(arrays, mine) <= self._room:
                for one, there in zip(arrays, self._views(half, me, arrays), strict=True):
                    there[:] = one
            self._collectives.barrier()
            most = max(self._needed(arrays, lengths) for lengths in self._lengths[half].tolist())
            if most <= self._room:
                return [self._views(half, rank, arrays) for rank in range(self._collectives.size)]
            self._make_room(2 * most)

    def _make_room(self, room: int) -> None:
        """Allocate memory for a number of bytes of each rank."""
        shape = (2, self._collectives.size, room)
        self._room, self._memory = room, self._collectives.memory(2 * self._collectives.size * room)
        self._lengths = np.ndarray(shape, np.uint8, self._memory)[..., : 8 * self._count].view(np.int64)

    def _needed(self, like: Sequence[np.ndarray], lengths: Sequence[int]) -> int:
        """Return the bytes of arrays with these lengths, including the lengths themselves."""
        return self._head + sum(map(_size, like, lengths))

    def _views(self, half: int, rank: int, like: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the memory of a rank's arrays."""
        start = (half * self._collectives.size + rank) * self._room + self._head
        views: list[Any] = []
        for one, length in zip(like, self._lengths[half, rank].tolist(), strict=True):
            views.append(np.ndarray((length, *one.shape[1:]), one.dtype, self._memory, start))
            start += _size(one, length)
        return views


def rows_as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of each row of a tensor, shape (rows, bytes), as a view if the tensor is contiguous.

    This uses NumPy, which needs a fraction of torch's time for few rows but has no bfloat16.
    """
    width = tensor.element_size() * math.prod(tensor.shape[1:])
    return as_bytes(tensor.contiguous()).reshape(len(tensor), width)


def _size(like: np.ndarray, length: int) -> int:
    """Return the number of bytes of this number of rows, rounded up to the start of the next array."""
    return padded(like.itemsize * math.prod(like.shape[1:]) * length)

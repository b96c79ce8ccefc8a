"""Where the workers of a call note which item they are at, and see that it is over: both ends of that.

A worker that is killed cannot say any more what it was doing, and one that is between two items hears no interrupt.
"""

from __future__ import annotations

import struct

from .segments import Segment

_ITEM = struct.Struct("<q")
_NONE = -1


class Board:
    """Shared memory with a number for each worker, and one for all: whether the call is over."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._memory = segment.shared()

    @staticmethod
    def of(fd: int, workers: int) -> Board:
        """In a worker: the one that it was given."""
        return Board(Segment(fd, _ITEM.size * (workers + 1)))

    @staticmethod
    def create(workers: int) -> Board:
        board = Board(Segment.create(_ITEM.size * (workers + 1)))
        for worker in range(workers):
            board.note(worker, _NONE)
        return board

    def note(self, worker: int, item: int) -> None:
        """The worker is about to work on this item."""
        _ITEM.pack_into(self._memory, _ITEM.size * (worker + 1), item)

    def item(self, worker: int) -> int | None:
        """What a worker has noted last."""
        item: int = _ITEM.unpack_from(self._memory, _ITEM.size * (worker + 1))[0]
        return None if item == _NONE else item

    def end(self) -> None:
        """Let no worker begin another item."""
        _ITEM.pack_into(self._memory, 0, 1)

    def over(self) -> bool:
        """Whether no item is to be begun any more."""
        return bool(self._memory[0])

    def close(self) -> None:
        """Give up this process's part."""
        self.segment.close()
        self._memory.close()

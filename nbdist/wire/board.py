"""The board: shared memory in which each worker writes the item that it works on, and reads whether the call is over.
Both ends.

It is needed because a killed worker cannot report its item, and a worker between two items gets no interrupt.
"""

from __future__ import annotations

from ..system.segments import Segment

_SIZE = 8  # bytes of a number
_NONE = -1


class Board:
    """Shared memory with a number for each worker, and a number that says whether the call is over.

    Attributes:
        cells: All these numbers; the number for the call is first. The loop of a worker reads and writes them directly,
            because it may have very many items.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._memory = segment.shared()
        self.cells = memoryview(self._memory).cast("q")

    @staticmethod
    def of(fd: int, workers: int) -> Board:
        """Open, in a worker, the board whose descriptor it was given."""
        return Board(Segment(fd, _SIZE * (workers + 1)))

    @staticmethod
    def create(workers: int) -> Board:
        board = Board(Segment.create(_SIZE * (workers + 1)))
        for worker in range(workers):
            board.note(worker, _NONE)
        return board

    def note(self, worker: int, item: int) -> None:
        """Write the item that the worker is about to work on."""
        self.cells[worker + 1] = item

    def item(self, worker: int) -> int | None:
        """Return the last item that a worker has noted."""
        item = self.cells[worker + 1]
        return None if item == _NONE else item

    def end(self) -> None:
        """Mark the call as over: no worker begins another item."""
        self.cells[0] = 1

    def close(self) -> None:
        """Unmap the memory in this process."""
        self.segment.close()
        self.cells.release()
        self._memory.close()

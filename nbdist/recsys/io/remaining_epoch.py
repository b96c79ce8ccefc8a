"""The remaining rows of an epoch, divided among other ranks or batches: plain arithmetic, as in `partition.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .partition import Partition


class PositionSpan(NamedTuple):
    """The positions ``start .. stop - 1`` of an epoch, which were assigned to one rank when the epoch was first
    divided."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class RemainingEpoch:
    """The rows of an epoch that no rank has trained on yet, and that will be divided among other ranks.

    Remaining row p, from 0, is at the p-th position of all spans in `left`, in this order.
    """

    begun: Partition
    """The division with which the epoch began, which determines the order of its rows."""
    left: tuple[PositionSpan, ...]

    @classmethod
    def after(cls, begun: Partition, step: int) -> RemainingEpoch:
        """Return the remaining rows after `step` steps. A row that `pad` repeats remains at most once."""
        spans = []
        for rank in range(begun.world_size):
            stop = begun.span(rank)[1] - begun.repeats(rank)
            spans.append(PositionSpan(rank, min(begun.batch_start(rank, step), stop), stop))
        return cls(begun, tuple(span for span in spans if span.start < span.stop))

    @property
    def rows(self) -> int:
        """The number of remaining rows."""
        return sum(span.stop - span.start for span in self.left)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, PositionSpan]]:
        """Yield the positions of the remaining rows ``start .. stop - 1``, as the first row of each piece and its span.

        After the last row, the first row follows again, so that a rank can repeat a row.
        """
        while start < stop:
            first = start % self.rows
            before = 0
            for rank, low, high in self.left:
                count = high - low
                if before <= first < before + count:
                    size = min(stop - start, before + count - first)
                    yield start, PositionSpan(rank, low + first - before, low + first - before + size)
                    start += size
                    break
                before += count

    def after_steps(self, divided: Partition, step: int) -> RemainingEpoch:
        """Return the rows that remain after these are divided as `divided` says and trained on for `step` steps."""
        again = RemainingEpoch.after(divided, step)
        return RemainingEpoch(
            self.begun, tuple(span for own in again.left for _, span in self.spans(own.start, own.stop))
        )

    def to_json(self) -> dict[str, Any]:
        begun = self.begun
        return {"begun": [begun.world_size, begun.batch_size], "left": [list(span) for span in self.left]}

    @classmethod
    def from_json(cls, state: dict[str, Any], rows: int, remainder: str) -> RemainingEpoch:
        world_size, batch_size = state["begun"]
        left: Sequence[Sequence[int]] = state["left"]
        return cls(Partition(rows, world_size, batch_size, remainder), tuple(PositionSpan(*span) for span in left))

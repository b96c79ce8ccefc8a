"""The rest of an epoch that goes on with other ranks or batches: plain arithmetic, as in `partition.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .partition import Partition


class Span(NamedTuple):
    """Positions ``start .. stop - 1`` of an epoch, which one rank had in the first division of the epoch."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rest:
    """The rows of an epoch that no rank has had yet, to be divided once more among other ranks.

    They follow one another as the spans do: row p of the rest, from 0, is at the p-th of their positions.
    """

    begun: Partition
    """The first division of the epoch, which determines the order of its rows."""
    left: tuple[Span, ...]

    @classmethod
    def after(cls, begun: Partition, step: int) -> Rest:
        """The rest after `step` steps. Rows that are repeated (`pad`) are left once, or not at all."""
        spans = []
        for rank in range(begun.world_size):
            stop = begun.span(rank)[1] - begun.repeats(rank)
            spans.append(Span(rank, min(begun.batch_start(rank, step), stop), stop))
        return cls(begun, tuple(span for span in spans if span.start < span.stop))

    @property
    def rows(self) -> int:
        """Number of rows that are left."""
        return sum(span.stop - span.start for span in self.left)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, Span]]:
        """Rows ``start .. stop - 1`` of the rest: where each piece of them begins, and the positions that it has.

        After the last row comes the first again, which is how a rank repeats one.
        """
        while start < stop:
            first = start % self.rows
            before = 0
            for rank, low, high in self.left:
                count = high - low
                if before <= first < before + count:
                    size = min(stop - start, before + count - first)
                    yield start, Span(rank, low + first - before, low + first - before + size)
                    start += size
                    break
                before += count

    def after_steps(self, divided: Partition, step: int) -> Rest:
        """The rest of this rest after `step` steps of the ranks that it was divided among."""
        again = Rest.after(divided, step)
        return Rest(self.begun, tuple(span for own in again.left for _, span in self.spans(own.start, own.stop)))

    def to_json(self) -> dict[str, Any]:
        begun = self.begun
        return {"begun": [begun.world_size, begun.batch_size], "left": [list(span) for span in self.left]}

    @classmethod
    def from_json(cls, state: dict[str, Any], rows: int, remainder: str) -> Rest:
        world_size, batch_size = state["begun"]
        left: Sequence[Sequence[int]] = state["left"]
        return cls(Partition(rows, world_size, batch_size, remainder), tuple(Span(*span) for span in left))

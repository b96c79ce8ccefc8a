"""The assignment of rows to ranks and steps: plain arithmetic, the same on every rank, no communication."""

from __future__ import annotations

from dataclasses import dataclass

REMAINDERS = ("keep", "pad", "drop")


@dataclass(frozen=True)
class Partition:
    """The division of an epoch of `rows` rows among ranks in steps of up to `batch_size` rows each.

    A *position* is a place in the epoch's order, which every rank knows: position p stands for row ``order[p % rows]``.
    A rank has a contiguous span of positions, which it processes in `steps` batches. No batch is empty, and all ranks
    have the same number of batches, so no collective waits for a rank that has finished.

    Raises:
        ValueError: A size is below 1, the `remainder` is unknown, or the rows cannot be divided in this way.
    """

    rows: int
    world_size: int
    batch_size: int
    """The number of rows of a step on each rank."""
    remainder: str = "keep"
    """"keep": every row is used exactly once; batches at the end are shorter, by different amounts on different ranks.
    "pad": all ranks have the same number of rows; some ranks repeat one row of another rank at the end. "drop": only
    full batches are used; the up to ``world_size * batch_size - 1`` rows that are last in the epoch's order are left
    out."""

    def __post_init__(self) -> None:
        if not hasattr(self.batch_size, "__index__"):
            raise ValueError(f"`batch_size` must be an integer, got {self.batch_size!r}")
        for name in ("rows", "world_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.remainder not in REMAINDERS:
            raise ValueError(f"`remainder` must be one of {', '.join(map(repr, REMAINDERS))}, got {self.remainder!r}")
        if self.steps == 0:
            raise ValueError(
                f"{self.rows} rows do not fill one batch of {self.batch_size} on each of {self.world_size} ranks, and "
                "remainder='drop' leaves out all others: use a smaller batch_size, or remainder='keep' or 'pad'"
            )
        if self.remainder == "keep" and self.rows // self.world_size < self.steps:
            raise ValueError(
                f"{self.rows} rows cannot be divided among {self.world_size} ranks, each row once, in equal numbers of "
                f"batches of at most {self.batch_size}: use remainder='pad' or 'drop', fewer ranks or another "
                "batch_size"
            )

    @property
    def steps(self) -> int:
        """The number of batches in an epoch, equal on every rank."""
        if self.remainder == "drop":
            return self.rows // (self.world_size * self.batch_size)
        largest_share = -(-self.rows // self.world_size)
        return -(-largest_share // self.batch_size)

    def span(self, rank: int) -> tuple[int, int]:
        """Return the positions ``start .. stop - 1`` of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be below world_size, got {rank} and {self.world_size}")
        divided = self.steps * self.world_size * self.batch_size if self.remainder == "drop" else self.rows
        share, more = divmod(divided, self.world_size)
        start = rank * share + min(rank, more)
        return start, start + share + (rank < more) + self.repeats(rank)

    def batch_start(self, rank: int, step: int) -> int:
        """Return the position where batch `step` of `rank` begins and the batch before it ends; 0 <= step <= steps."""
        return self.batch_starts(rank, range(step, step + 1))[0]

    def batch_starts(self, rank: int, steps: range) -> list[int]:
        """Return the first positions of some steps."""
        start, stop = self.span(rank)
        end = self.steps
        # Shares differ by one row: a rank whose rows would end a step early leaves one for the last step.
        return [stop if step == end else min(start + step * self.batch_size, stop - 1) for step in steps]

    def size(self, rank: int, step: int) -> int:
        """Return the number of rows in batch `step` of `rank`."""
        return self.batch_start(rank, step + 1) - self.batch_start(rank, step)

    def repeats(self, rank: int) -> int:
        """Return the number of rows at the end of `rank`'s span that repeat other rows, to make ranks equal: 0 or 1."""
        return int(self.remainder == "pad" and 0 < self.rows % self.world_size <= rank)

    def size_without_repeats(self, rank: int, step: int) -> int:
        """Return the number of rows of batch `step`, from the first, that are not repeats."""
        return self.size(rank, step) - (self.repeats(rank) if step == self.steps - 1 else 0)

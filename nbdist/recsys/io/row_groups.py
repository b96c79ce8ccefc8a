"""Row groups, the units in which Parquet files are read: the groups of some rows, and the number that fits into
memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class RowGroup(NamedTuple):
    """The unit in which a Parquet file can be read."""

    file: int
    number: int
    rows: int
    size: int
    """The number of bytes that its chosen columns take as tensors."""


class Piece(NamedTuple):
    """Consecutive rows ``start .. stop - 1`` of a row group."""

    group: RowGroup
    start: int
    stop: int


def slice_groups(groups: Sequence[RowGroup], start: int, count: int) -> list[Piece]:
    """Return the pieces of `count` rows from row `start` on. After the last group, the first one follows."""
    start %= sum(group.rows for group in groups)
    pieces, turn = [], 0
    while count:
        group = groups[turn % len(groups)]
        turn += 1
        if start >= group.rows:
            start -= group.rows
            continue
        stop = min(group.rows, start + count)
        pieces.append(Piece(group, start, stop))
        count -= stop - start
        start = 0
    return pieces


def windows(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Yield the pieces of consecutive windows. A window has at least one piece, and as many pieces as fit into
    `size` bytes, with 8 additional bytes for each row.
    """
    window: list[Piece] = []
    taken = 0
    for piece in pieces:
        rows = piece.stop - piece.start
        bytes_ = -(-piece.group.size * rows // piece.group.rows) + 8 * rows
        if window and taken + bytes_ > size:
            yield window
            window, taken = [], 0
        window.append(piece)
        taken += bytes_
    if window:
        yield window

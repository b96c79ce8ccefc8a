"""Rank arithmetic, for any numbers: every row, equal steps, no empty batch, or a plain refusal."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nbdist.recsys.io.partition import REMAINDERS, Partition
from nbdist.recsys.io.row_groups import RowGroup, slice_groups, windows

groups = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda rows: [RowGroup(0, i, n, 16 * n) for i, n in enumerate(rows)]
)


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 40), st.sampled_from(REMAINDERS))
def test_every_row_is_dealt_out_in_equal_steps(rows: int, world: int, batch: int, remainder: str) -> None:
    try:
        partition = Partition(rows, world, batch, remainder)
    except ValueError:
        assert remainder != "pad"
        share = -(-rows // world)
        # "drop": not one full batch each. "keep": some rank has fewer rows than there are steps.
        assert rows < world * batch if remainder == "drop" else rows // world < -(-share // batch)
        return
    seen: list[int] = []
    for rank in range(world):
        boundaries = [partition.batch_start(rank, step) for step in range(partition.steps + 1)]
        assert (boundaries[0], boundaries[-1]) == partition.span(rank)
        sizes = [partition.size(rank, step) for step in range(partition.steps)]
        assert sizes == [b - a for a, b in itertools.pairwise(boundaries)]
        assert min(sizes) >= 1 and max(sizes) <= batch and all(size == batch for size in sizes[:-2])
        for step, size in enumerate(sizes):
            fresh = partition.size_without_repeats(rank, step)
            assert fresh == size or (remainder == "pad" and fresh == size - 1 and step == partition.steps - 1)
            seen += [position % rows for position in range(boundaries[step], boundaries[step] + fresh)]
    if remainder == "drop":
        assert sorted(seen) == list(range(rows - rows % (world * batch)))
        assert {partition.size(rank, step) for rank in range(world) for step in range(partition.steps)} == {batch}
    else:
        assert sorted(seen) == list(range(rows))
    if remainder == "pad":
        assert all(len({partition.size(rank, step) for rank in range(world)}) == 1 for step in range(partition.steps))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, "keep"), "`rows` must be at least 1, got 0"),
        ((5, 0, 1, "keep"), "`world_size` must be at least 1, got 0"),
        ((5, 1, 0, "keep"), "`batch_size` must be at least 1, got 0"),
        ((5, 1, 1, "some"), "'keep', 'pad', 'drop'"),
        ((3, 4, 8, "keep"), "3 rows cannot be divided among 4 ranks"),
        ((3, 2, 1, "keep"), "remainder='pad' or 'drop'"),
        ((15, 2, 8, "drop"), "do not fill one batch of 8"),
    ],
)
def test_impossible_partitions_are_refused(sizes: tuple[int, int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(*sizes)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="rank must be below world_size, got 2 and 2"):
        Partition(10, 2, 2).span(2)


@given(groups, st.integers(0, 200), st.integers(1, 200))
def test_pieces_are_the_rows_in_a_circle(groups: list[RowGroup], start: int, count: int) -> None:
    rows = [(group.number, row) for group in groups for row in range(group.rows)]
    assume(count <= 3 * len(rows))
    dealt = [
        (group.number, row) for group, first, stop in slice_groups(groups, start, count) for row in range(first, stop)
    ]
    assert dealt == [rows[(start + i) % len(rows)] for i in range(count)]


@given(groups, st.integers(0, 400))
def test_windows_hold_all_pieces_within_their_size(groups: list[RowGroup], size: int) -> None:
    pieces = slice_groups(groups, 0, sum(group.rows for group in groups))
    made = list(windows(pieces, size))
    assert [piece for window in made for piece in window] == pieces
    assert all(len(window) == 1 or sum(24 * (piece.stop - piece.start) for piece in window) <= size for window in made)

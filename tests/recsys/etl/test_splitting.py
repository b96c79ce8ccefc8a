"""Histories are divided as a naive reference says, and no row is lost or twice."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.etl import leave_one_out, sequences, time_split, with_history

rows = st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 6))), max_size=40)


def frame_of(rows: list[Any]) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema={"user": pl.Int64, "timestamp": pl.Int64}, orient="row")
    return frame.with_row_index("row")


@given(rows)
@settings(max_examples=25, deadline=None)
def test_the_last_rows_of_each_user(rows: list[Any]) -> None:
    expected: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    for user in {user for user, _ in rows}:
        mine = [(-1 if time is None else time, row) for row, (one, time) in enumerate(rows) if one == user]
        order = [row for _, row in sorted(mine)]
        held = [order.pop(), order.pop()] if len(order) >= 3 else []
        for part, row in zip(("test", "valid"), held, strict=False):
            expected[part].append(row)
        expected["train"] += order
    split = leave_one_out(frame_of(rows))
    lazy = leave_one_out(frame_of(rows).lazy())
    for part, one in vars(split).items():
        assert one["row"].to_list() == sorted(expected[part]), part
        assert one.columns == ["row", "user", "timestamp"] and getattr(lazy, part).collect().equals(one)


@given(rows, st.floats(0, 0.5), st.floats(0, 0.49))
@settings(max_examples=25, deadline=None)
def test_parts_by_time(rows: list[Any], valid: float, test: float) -> None:
    frame = frame_of(rows)
    split = time_split(frame, valid=valid, test=test)
    assert sorted(row for part in split for row in part["row"]) == list(range(len(rows)))
    times = [part["timestamp"].drop_nulls().to_list() for part in split]
    assert all(max(a, default=-1) < min(b, default=99) for a, b in itertools.pairwise(times))
    assert max(times[0], default=-1) < min(times[2], default=99)
    assert len(split.test) <= math.ceil(test * len(rows)), "what has the time of the first is not cut apart"
    for lazy, one in zip(time_split(frame.lazy(), valid=valid, test=test), split, strict=True):
        assert lazy.collect().equals(one)


def test_parts_of_different_times_are_as_large_as_was_said() -> None:
    frame = pl.DataFrame({"timestamp": range(1000)}).sample(fraction=1, shuffle=True, seed=1)
    assert [len(part) for part in time_split(frame, valid=0.25, test=0.1)] == [650, 250, 100]


@given(st.integers(0, 1200), st.integers(0, 50), st.integers(0, 49), st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_parts_of_any_size_are_rounded(rows: int, valid: int, test: int, nulls: int) -> None:
    times = [*range(rows), *[None] * nulls]
    frame = pl.DataFrame({"timestamp": times}, schema={"timestamp": pl.Int64})
    tested, validated = round((rows + nulls) * (test / 100)), round((rows + nulls) * (valid / 100))
    split = time_split(frame, valid=valid / 100, test=test / 100)
    assert len(split.test) == min(tested, rows)
    assert len(split.valid) == max(min(validated, rows - tested), 0)
    assert split.train["timestamp"].null_count() == nulls


@pytest.mark.parametrize(
    ("rows", "valid", "test", "sizes"),
    [(1000, 0.15, 0.05, [800, 150, 50]), (20, 0.15, 0.05, [16, 3, 1]), (200, 0, 0.1, [180, 0, 20])],
)
def test_parts_that_no_float_is_exactly(rows: int, valid: float, test: float, sizes: list[int]) -> None:
    frame = pl.DataFrame({"timestamp": range(rows)})
    for number in (float, np.float32):
        parts = time_split(frame, valid=number(valid), test=number(test))
        assert [len(part) for part in parts] == sizes
    assert [len(part) for part in time_split(frame, valid=valid, test=test)] == sizes


def test_a_time_that_is_nan_is_before_all_others() -> None:
    frame = pl.DataFrame({"user": [1] * 4, "timestamp": [1.0, float("nan"), 2.0, 3.0]})
    for split in (leave_one_out(frame), time_split(frame, valid=0.25, test=0.25)):
        assert [part["timestamp"].fill_nan(-1).to_list() for part in split] == [[1.0, -1.0], [2.0], [3.0]]
    assert sequences(frame.with_row_index("row"), "row")["row"].to_list() == [[1, 0, 2, 3]]
    assert with_history(frame.with_row_index("row"), "row")["history"].to_list() == [[1], [], [1, 0], [1, 0, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda frame: leave_one_out(frame, by="who"), "no column 'who'; the columns are 'row', 'user', 'timestamp'"),
        (lambda frame: time_split(frame, time="when"), "no column 'when'"),
        (lambda frame: time_split(frame, valid=0.5, test=0.5), "together less than 1"),
        (lambda frame: time_split(frame, valid=0.5, test=3), "must both be parts of the rows, or both times"),
        (lambda frame: time_split(frame, valid=5, test=3), "`valid` must not be after `test`, got 5 and 3"),
        (
            lambda frame: time_split(frame.cast({"timestamp": pl.Datetime}), valid="2024-01-01", test="2024-02-01"),
            "must be times as in column 'timestamp', got '2024-01-01' and .*; the column is Datetime",
        ),
    ],
)
def test_invalid_arguments_of_split_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(frame_of([(1, 1)]))

"""Training, validation and test rows of histories: split by each user's last rows, or by time."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import polars as pl

from ..io.frames import require_frame
from .ops.step import names_of

Frame = TypeVar("Frame", pl.DataFrame, pl.LazyFrame)
_PART = "part (nbdist)"  # no column of the user's
_TRAIN, _VALID, _TEST = 0, 1, 2


@dataclass(frozen=True)
class Split(Generic[Frame]):
    """Rows in three parts, each in the original order.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import leave_one_out
        >>> rows = pl.DataFrame({"user": [1, 1, 1], "timestamp": [5, 7, 6]})
        >>> split = leave_one_out(rows)
        >>> split.test.rows(), len(split.train)
        ([(1, 7)], 1)
    """

    train: Frame
    valid: Frame
    test: Frame

    def __iter__(self) -> Iterator[Frame]:
        return iter((self.train, self.valid, self.test))


def leave_one_out(rows: Frame, *, by: str | Sequence[str] = "user", time: str = "timestamp") -> Split[Frame]:
    """Take the last row of each user for testing, the one before it for validation, and all others for training.

    Rows of users with fewer than three rows are all training rows. Among rows with the same time, the later one in
    `rows` counts as later; a null or NaN time comes before all others.

    Args:
        rows: A frame of polars or pandas, an Arrow table, or a dict of columns. A lazy frame stays lazy.
        by: The column of users, or several whose values together are a user.
        time: The column that orders the rows of a user.

    Raises:
        ValueError: A column is missing.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import leave_one_out
        >>> rows = pl.DataFrame({"user": [1, 1, 1, 1, 2], "movie": [10, 30, 20, 40, 10], "timestamp": [1, 3, 2, 4, 1]})
        >>> train, valid, test = leave_one_out(rows)
        >>> train["movie"].to_list(), valid["movie"].to_list(), test["movie"].to_list()
        ([10, 20, 10], [30], [40])
    """
    rows, by = as_frame(rows), names_of(by)
    check_columns(rows, *by, time)
    known = known_time(rows, time)
    none = known.is_null()
    ranked = known.rank("ordinal").over(by) + none.sum().over(by)
    order = pl.when(none).then(none.cum_sum().over(by)).otherwise(ranked)
    behind = pl.len().over(by) - order  # how many rows of the user come later
    part = (
        pl.when(pl.len().over(by) < 3)
        .then(_TRAIN)
        .otherwise(pl.when(behind == 0).then(_TEST).when(behind == 1).then(_VALID).otherwise(_TRAIN))
    )
    return _divide(rows, part)


def time_split(
    rows: Frame, *, time: str = "timestamp", valid: float | Any = 0.1, test: float | Any = 0.1
) -> Split[Frame]:
    """Take the latest rows for testing, the rows before them for validation, and the earliest for training.

    Rows with the same time are in the same part: the part of the first of them. A null or NaN time comes before all
        others.

    Args:
        rows: As for `leave_one_out`.
        time: The column that divides the rows.
        valid: The share of the rows for validation, 0 to 1, rounded to the nearest number of rows; or the time of the
            first of these rows.
        test: The share, or the first time, of the test rows. `valid` and `test` must both be shares or both be times.

    Raises:
        ValueError: A column is missing, or `valid` and `test` do not fit together.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import time_split
        >>> rows = pl.DataFrame({"movie": range(10), "timestamp": range(100, 110)})
        >>> train, valid, test = time_split(rows, valid=0.2, test=0.1)
        >>> len(train), valid["movie"].to_list(), test["movie"].to_list()
        (7, [7, 8], [9])
        >>> [len(part) for part in time_split(rows, valid=103, test=108)]
        [3, 5, 2]
    """
    rows = as_frame(rows)
    check_columns(rows, time)
    parts = [_is_part(valid), _is_part(test)]
    if any(parts) and not all(part or one == 0 for part, one in zip(parts, (valid, test), strict=True)):
        raise ValueError(
            f"`valid` and `test` must both be parts of the rows, or both times, got {valid!r} and {test!r}"
        )
    known = known_time(rows, time)
    first: Any
    last: Any
    if any(parts):
        valid, test = float(valid), float(test)
        if not (valid >= 0 and test >= 0 and valid + test < 1):
            raise ValueError(f"`valid` and `test` must be at least 0, and together less than 1, got {valid} and {test}")
        # Of rows of the same time, the place of the first of them.
        place = known.rank("min").cast(pl.Int64) + known.null_count()
        tested = (pl.len() * test).round().cast(pl.Int64)
        first, last = place > pl.len() - tested - (pl.len() * valid).round().cast(pl.Int64), place > pl.len() - tested
    else:
        if not valid <= test:
            raise ValueError(f"`valid` must not be after `test`, got {valid!r} and {test!r}")
        try:
            rows.lazy().select(valid=known >= valid, test=known >= test).collect_schema()
        except pl.exceptions.PolarsError as error:
            raise ValueError(
                f"`valid` and `test` must be times as in column {time!r}, got {valid!r} and {test!r}; the column is "
                f"{rows.collect_schema()[time]}: {error}"
            ) from error
        first, last = known >= valid, known >= test
    return _divide(rows, pl.when(last).then(_TEST).when(first).then(_VALID).otherwise(_TRAIN))


def _is_part(value: Any) -> bool:
    """Return whether `value` is a share of the rows, and not a time."""
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def known_time(rows: pl.DataFrame | pl.LazyFrame, time: str) -> pl.Expr:
    """Return the column of times, with null for NaN."""
    column = pl.col(time)
    return column.fill_nan(None) if rows.collect_schema()[time].is_float() else column


def _divide(rows: Frame, part: pl.Expr) -> Split[Frame]:
    marked = rows.with_columns(part.alias(_PART))
    train, valid, test = (marked.filter(pl.col(_PART) == one).drop(_PART) for one in (_TRAIN, _VALID, _TEST))
    return Split(train, valid, test)


def as_frame(rows: Frame) -> Frame:
    """The rows as a frame of polars."""
    return require_frame(rows, "rows")  # type: ignore[return-value]


def check_columns(rows: pl.DataFrame | pl.LazyFrame, *columns: str) -> None:
    """Raise `ValueError` for a column that is missing."""
    there = rows.collect_schema()
    for name in columns:
        if name not in there:
            raise ValueError(f"there is no column {name!r}; the columns are {', '.join(map(repr, there))}")

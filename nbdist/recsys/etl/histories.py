"""Histories: what users took, in the order of time, as lists: of each user, or for each row of what came before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from .splitting import Frame, check_columns


def sequences(
    rows: Frame, *columns: str, by: str = "user", time: str = "timestamp", length: int | None = None
) -> Frame:
    """A row for each user, with lists of what their rows have, in the order of time.

    Rows of the same time keep their order; a time that is null is before all others. Users come in the order in which
    they first appear.

    Args:
        rows: A frame, or a lazy one: then nothing is computed.
        *columns: What to make lists of, such as the movie.
        by: The column of users.
        time: The column that rows are ordered by.
        length: How many rows of a user count, the last ones. None: all.

    Raises:
        ValueError: There is no such column, or none is named; or a length below 1.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import sequences
        >>> rows = pl.DataFrame({"user": [1, 2, 1, 1], "movie": [30, 10, 10, 20], "timestamp": [3, 1, 1, 2]})
        >>> sequences(rows, "movie", length=2).rows()
        [(1, [20, 30]), (2, [10])]
    """
    _check(rows, columns, by, time, length)
    lists = [pl.col(name).sort_by(time, nulls_last=False, maintain_order=True) for name in columns]
    if length is not None:
        lists = [one.tail(length) for one in lists]
    return rows.group_by(by, maintain_order=True).agg(lists)


def with_history(
    rows: pl.DataFrame,
    column: str,
    *,
    by: str = "user",
    time: str = "timestamp",
    length: int = 50,
    name: str = "history",
) -> pl.DataFrame:
    """The rows with a further column: for each of them, what its user took before it, in the order of time.

    Order as in `sequences`; the rows stay where they are. It is made in memory.

    Args:
        rows: A frame.
        column: What to make lists of, such as the movie.
        by: The column of users.
        time: The column that rows are ordered by.
        length: How many count, the last ones.
        name: The new column.

    Raises:
        ValueError: There is no such column, or `name` is one already; or a length below 1.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import with_history
        >>> rows = pl.DataFrame({"user": [1, 2, 1, 1], "movie": [30, 10, 10, 20], "timestamp": [3, 1, 1, 2]})
        >>> with_history(rows, "movie", length=1)["history"].to_list()
        [[20], [], [], [10]]
    """
    _check(rows, [column], by, time, length)
    if name in rows.columns:
        raise ValueError(f"there is a column {name!r} already: choose another name=")
    number = pl.int_range(pl.len())
    order = rows.select(number.sort_by(by, time, nulls_last=False, maintain_order=True)).to_series()
    ordered = rows.select(by, column)[order]
    place = ordered.select(number.over(by)).to_series().to_numpy()  # of a row among those of its user
    lengths = np.minimum(place, length)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # Value j of the lists belongs to row i, and is that of row i - lengths[i] + (j - offsets[i]).
    first = np.arange(len(place)) - lengths - offsets[:-1]
    values = ordered[column].gather(np.repeat(first, lengths) + np.arange(offsets[-1]))
    lists = pl.from_arrow(pa.LargeListArray.from_arrays(offsets, values.to_arrow(compat_level=pl.CompatLevel.oldest())))
    assert isinstance(lists, pl.Series)
    back = np.empty(len(place), np.int64)
    back[order.to_numpy()] = np.arange(len(place))
    return rows.with_columns(lists.cast(pl.List(rows.schema[column])).gather(back).alias(name))


def _check(rows: pl.DataFrame | pl.LazyFrame, columns: Sequence[str], by: str, time: str, length: int | None) -> None:
    if not columns:
        raise ValueError("no columns are named")
    check_columns(rows, by, time, *columns)
    if length is not None and length < 1:
        raise ValueError(f"length={length}: at least 1")

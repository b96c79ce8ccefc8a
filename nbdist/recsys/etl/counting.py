"""Counts of the values of a column, over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl

from .. import ranks
from .vocabulary import keyed_like

_COUNT = "count (nbdist)"  # no column of the user's


def count_values(
    name: str, dtype: pl.DataType, table: pl.DataFrame | None = None, on: Sequence[str] = ()
) -> Callable[[pl.LazyFrame], pl.LazyFrame]:
    """Return a query that counts the values of a column, or of its lists: `value`, null included, and `count`.

    Args:
        table: A table that has the column, and is joined to the rows by the key `on`. The count needs no join: it
            counts the keys in the rows, and then adds up these counts over the rows of the table.
    """
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    plain = pl.String if isinstance(inner, (pl.Categorical, pl.Enum)) else inner

    def count(frame: pl.LazyFrame) -> pl.LazyFrame:
        if table is None and isinstance(dtype, pl.List):
            frame = _explode(frame, name)
        counted = frame.group_by(on or name).agg(pl.len().cast(pl.Int64).alias(_COUNT))
        if table is not None:
            schema = counted.collect_schema()
            alike = keyed_like(table, {name: schema[name] for name in on})
            counted = counted.join(alike.lazy(), on=on, how="left")
            if isinstance(dtype, pl.List):
                counted = _explode(counted, name)
        values = counted.select(pl.col(name).cast(plain).alias("value"), pl.col(_COUNT).alias("count"))
        return values.group_by("value").agg(pl.col("count").sum())

    return count


def _explode(frame: pl.LazyFrame, name: str) -> pl.LazyFrame:
    """Return a row for each element of the lists, one row with null for a null list, and none for an empty list."""
    return frame.filter(pl.col(name).list.len().ne_missing(0)).explode(name)


class Counts:
    """The count of each value, collected part by part, and at the end over all ranks."""

    def __init__(self) -> None:
        self._frames: list[pl.DataFrame] = []
        self._room = 1 << 20

    def add(self, frame: pl.DataFrame) -> None:
        """Add counts: a frame with the columns `value`, in which each value is once, and `count`."""
        self._frames.append(frame)
        if sum(one.height for one in self._frames) > self._room:
            self._frames = [_merge(self._frames)]
            self._room = max(self._room, 2 * self._frames[0].height)

    def everywhere(self) -> pl.DataFrame:
        """Return the counts of all ranks together, on each rank, in no particular order."""
        mine = _merge(self._frames).write_ipc(None).getvalue() if self._frames else None  # a rank may have no rows
        return _merge([pl.read_ipc(data) for data in ranks.all_gather(mine) if data is not None])


def _merge(counted: Sequence[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(counted).group_by("value").agg(pl.col("count").sum())

"""Counts, sums, squares and extremes of a column for each key, independent of the division of the rows.

The sum of floats depends on their order, and files must not depend on the number of ranks. So each float is split into
integers, whose sum does not depend on the order, and only the sums become floats again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from .. import ranks

VALUE = "value"
"""The name of the column whose values are added up."""
ROWS, COUNT, SUM, SQUARES, LEAST, MOST = "rows", "count", "sum", "squares", "least", "most"
"""The columns of a table besides its keys: the number of rows; the number of rows with a value; the sum of the values,
the sum of squared distances from their mean (null if it is not needed), the smallest and the largest value. `key`
changes names of keys so that they never equal these."""
_EXPONENT, _HIGH, _LOW, _NUMBER = "exponent", "high", "low", "number"
_WINDOW = 8  # exponents that are added up together
_LOW_BITS = 30  # so that neither half of a value overflows in 2**33 rows
_LARGEST = 1e150  # whose square is a number


@dataclass(frozen=True)
class Aggregate:
    """An aggregate to compute: a column, and the keys whose combinations it is computed for."""

    keys: tuple[str, ...]
    """The keys. Empty: one aggregate over all rows."""
    column: str | None
    """The column. None: only rows are counted."""
    squares: bool = False
    """True if the squared distances from the mean are needed; they take another pass over the rows."""


def key(name: str) -> str:
    """Return a table's column for the key `name`."""
    return f"key {name}"


def columns_of(keys: Sequence[str]) -> dict[str, pl.DataType | None]:
    """Return the columns of a table, with their types; the type of a key is None."""
    counts, numbers = (ROWS, COUNT), (SUM, SQUARES, LEAST, MOST)
    return {
        **dict.fromkeys(map(key, keys)),
        **dict.fromkeys(counts, pl.Int64()),
        **dict.fromkeys(numbers, pl.Float64()),
    }


def known(column: pl.Expr) -> pl.Expr:
    """Return the values to use, as float64. Nulls, NaN, and values beyond 1e150 in size become null."""
    values = column.cast(pl.Float64)
    return pl.when(values.abs() <= _LARGEST).then(values)


def mean() -> pl.Expr:
    """Return the mean in a table. If all values are equal, the mean is exactly this value, without the rounding error
    of a sum.
    """
    return (pl.col(SUM) / pl.col(COUNT)).clip(pl.col(LEAST), pl.col(MOST))


class Sums:
    """The sums of an `Aggregate`, collected part by part, and at the end over all ranks.

    Args:
        keys: The keys of the rows, with the names in `key`.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key(name) for name in keys]
        self._frames: list[tuple[pl.DataFrame, pl.DataFrame]] = []
        self._room = 1 << 20

    def add(self, rows: pl.DataFrame) -> None:
        """Add rows with the keys and `VALUE`: float64, null for a missing value, never NaN or infinite."""
        value = pl.col(VALUE)
        counted = self._grouped(
            rows,
            pl.len().cast(pl.Int64).alias(ROWS),
            value.count().cast(pl.Int64).alias(COUNT),
            value.min().alias(LEAST),
            value.max().alias(MOST),
        )
        self._frames.append((counted, self._cut(rows.drop_nulls(VALUE))))
        if sum(parts.height for _, parts in self._frames) > self._room:
            self._frames = [self._merged(self._frames)]
            self._room = max(self._room, 2 * self._frames[0][1].height)

    def everywhere(self) -> pl.DataFrame:
        """Return the table of all ranks' rows together, on each rank, sorted by the keys; without `SQUARES`."""
        mine = None  # a rank may have no rows
        if self._frames:
            mine = [frame.write_ipc(None).getvalue() for frame in self._merged(self._frames)]
        gathered = [data for data in ranks.all_gather(mine) if data is not None]
        counted, parts = self._merged([(pl.read_ipc(one), pl.read_ipc(other)) for one, other in gathered])
        if self._keys:
            counted = counted.sort(self._keys).with_row_index(_NUMBER)
            parts = parts.join(counted.select(_NUMBER, *self._keys), on=self._keys, how="left", nulls_equal=True)
            parts = parts.sort(_NUMBER, _EXPONENT)  # so that all ranks, however many, add up floats in one order
        else:
            counted = counted.with_row_index(_NUMBER)
            parts = parts.with_columns(pl.lit(0, pl.UInt32).alias(_NUMBER)).sort(_EXPONENT)
        high, low, exponent, number = (parts[name].to_numpy() for name in (_HIGH, _LOW, _EXPONENT, _NUMBER))
        whole = np.ldexp(high.astype(np.float64), _LOW_BITS) + low
        values = np.ldexp(whole, _WINDOW * exponent.astype(np.int64) - 53)
        sums = np.bincount(number, values, counted.height).astype(np.float64)  # of no values, it makes integers
        return counted.select(*self._keys, ROWS, COUNT, pl.Series(SUM, sums), LEAST, MOST)

    def _cut(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Split values into integers, ``(high * 2**30 + low) * 2**(8 * exponent - 53)``, and sum those with equal
        exponents and keys."""
        mantissas, exponents = np.frexp(rows[VALUE].to_numpy())
        windows = exponents // _WINDOW
        whole = np.ldexp(mantissas, 53 + exponents - _WINDOW * windows).astype(np.int64)
        parts = rows.select(
            *self._keys,
            pl.Series(_EXPONENT, windows.astype(np.int16)),
            pl.Series(_HIGH, whole >> _LOW_BITS),
            pl.Series(_LOW, whole & (1 << _LOW_BITS) - 1),
        )
        return self._added(parts)

    def _added(self, parts: pl.DataFrame) -> pl.DataFrame:
        return parts.group_by(*self._keys, _EXPONENT).agg(pl.col(_HIGH, _LOW).sum())

    def _grouped(self, frame: pl.DataFrame, *columns: pl.Expr) -> pl.DataFrame:
        return frame.group_by(self._keys).agg(columns) if self._keys else frame.select(columns)

    def _merged(self, frames: Sequence[tuple[pl.DataFrame, pl.DataFrame]]) -> tuple[pl.DataFrame, pl.DataFrame]:
        counted = self._grouped(
            pl.concat(one for one, _ in frames), pl.col(ROWS, COUNT).sum(), pl.col(LEAST).min(), pl.col(MOST).max()
        )
        return counted, self._added(pl.concat(parts for _, parts in frames))


def squared_distances(rows: pl.DataFrame, table: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Return the keys of rows, and, as `VALUE`, the squared distance from the mean of their key in `table`."""
    names = [key(name) for name in keys]
    means = table.select(*names, mean().alias("mean"))
    joined = rows.join(means, on=names, how="left", nulls_equal=True) if names else rows.join(means, how="cross")
    return joined.select(*names, (pl.col(VALUE) - pl.col("mean")) ** 2)


def merged(tables: Sequence[pl.DataFrame], keys: Sequence[str]) -> pl.DataFrame:
    """Merge tables of different rows into one, sorted by the keys."""
    names = [key(name) for name in keys]
    order = [*names, ROWS, COUNT, SUM, SQUARES, LEAST, MOST]  # columns of merged tables, and of new ones, differ in it
    rows = pl.concat(table.select(order) for table in tables)
    # Between one and the next of them, as Chan, Golub and LeVeque (1979) have it; of a single one, 0.
    apart = (mean().first() - mean().last()) ** 2 * pl.col(COUNT).first() * pl.col(COUNT).last() / pl.col(COUNT).sum()
    columns = [
        pl.col(ROWS, COUNT, SUM).sum(),
        pl.when(pl.col(SQUARES).count() == pl.len()).then(pl.col(SQUARES).sum() + apart.fill_nan(0.0)).alias(SQUARES),
        pl.col(LEAST).min(),
        pl.col(MOST).max(),
    ]
    if not names:
        return rows.select(columns)
    return rows.group_by(names, maintain_order=True).agg(columns).sort(names)


def overall(table: pl.DataFrame) -> dict[str, float]:
    """Return the statistics of a table as if all its rows had one key: `mean`, `std`, `var`, `min`, `max`; 0 for an
    empty table.

    They are sample statistics: the variance divides by the number of values minus one, and is 0 for a single value.
    """
    table = table.filter(pl.col(COUNT) > 0)
    count = int(table[COUNT].sum())
    if not count:
        return dict.fromkeys(("mean", "std", "var", "min", "max"), 0.0)
    least: Any = table[LEAST].min()
    most: Any = table[MOST].max()
    middle = min(max(math.fsum(table[SUM].to_list()) / count, least), most)
    apart = table.select(pl.col(COUNT) * (mean() - middle) ** 2).to_series()
    squares = math.fsum([*table[SQUARES].fill_null(0.0).to_list(), *(apart.to_list() if len(table) > 1 else [])])
    var = squares / max(1, count - 1)
    return {"mean": middle, "std": math.sqrt(var), "var": var, "min": least, "max": most}

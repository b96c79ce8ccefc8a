"""A fingerprint of rows in order: it does not depend on their division among parts and ranks, or on their types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from .. import ranks
from .hashing import combined, hashed
from .moments import key
from .ops.step import ROW
from .vocabulary import value_type

_NULL = 0x9AE16A3B2F90404F  # the hash of a null


class Fingerprint:
    """The sum of the hashes of all rows. The hash of a row covers its number and its values in some columns.

    Args:
        columns: The names of these columns.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = list(columns)
        self._sums = [0, 0]

    def add(self, rows: pl.DataFrame) -> None:
        """Add rows. Their columns, and `ROW`, have the names that `key` returns."""
        found = rows.select(hash=pl.col(key(ROW)).cast(pl.UInt64))
        for name in map(key, self.columns):  # step by step: a hash as an expression is eight times what it is of
            found = found.with_columns(_hash(rows[name]).alias("other")).select(
                hash=combined(pl.col("hash"), pl.col("other"))
            )
        halves = found.select(pl.col("hash") // 2**32, low=pl.col("hash") % 2**32).sum()
        self._sums = [one + (more or 0) for one, more in zip(self._sums, halves.row(0), strict=True)]

    def everywhere(self) -> str:
        """Return the fingerprint of the rows of all ranks together, on each of them."""
        high, low = (sum(one) for one in zip(*ranks.all_gather(self._sums), strict=True))
        return f"{((high << 32) + low) % 2**64:016x}"


def _hash(column: pl.Series) -> pl.Series:
    """Return the hash of each value, uint64. A float is hashed by its bits, but 0.0 and -0.0 have the same hash,
    and so do null and NaN.
    """
    if column.dtype.is_float():
        values = column.cast(pl.Float64).fill_nan(None) + 0.0
        bits = pl.Series(np.ascontiguousarray(values.fill_null(0.0).to_numpy()).view(np.uint64))
        return bits.zip_with(values.is_not_null(), pl.Series([_NULL], dtype=pl.UInt64).new_from_index(0, len(bits)))
    kind = value_type(column.dtype, "")
    return pl.select(hashed(pl.lit(column.cast(kind)), kind).fill_null(pl.lit(_NULL, pl.UInt64))).to_series()

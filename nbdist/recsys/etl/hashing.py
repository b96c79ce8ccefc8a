"""Hashes of values, the same in every process, version and machine. `triton/served/preprocess.py` computes the same
hashes.

polars' own `hash` changes between versions of polars, and the codes of a trained model must not.
"""

from __future__ import annotations

import zlib

import polars as pl

# Of SplitMix64 (Steele, Lea and Flood, 2014): consecutive ids come to lie anywhere.
_ADD, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashed(value: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Return the hash of each value, uint64; null for null.

    Args:
        value: Integers, booleans, strings or dates.
        dtype: The type of the values.
    """
    if dtype == pl.String:
        return value.map_batches(_checksums, return_dtype=pl.UInt64, is_elementwise=True)
    return _mixed(value if dtype == pl.UInt64 else value.cast(pl.Int64).reinterpret(signed=False))


def combined(first: pl.Expr, second: pl.Expr) -> pl.Expr:
    """Combine two hashes, in this order."""
    return _mixed(first * pl.lit(_FIRST, pl.UInt64) + second)


def _mixed(value: pl.Expr) -> pl.Expr:
    """Return SplitMix64's next number."""
    mixed = value + pl.lit(_ADD, pl.UInt64)  # modulo 2**64, as the products
    mixed = (mixed ^ (mixed // 2**30)) * pl.lit(_FIRST, pl.UInt64)
    mixed = (mixed ^ (mixed // 2**27)) * pl.lit(_SECOND, pl.UInt64)
    return mixed ^ (mixed // 2**31)


def _checksums(values: pl.Series) -> pl.Series:
    """Return the CRC-32 of each string's UTF-8, computed once for equal strings."""
    distinct = values.unique().drop_nulls()
    sums = pl.Series([zlib.crc32(value.encode()) for value in distinct.to_list()], dtype=pl.UInt64)
    return values.replace_strict(distinct, sums, default=None, return_dtype=pl.UInt64)

"""Rows in memory as polars frames: from polars, pandas, Arrow, dicts of columns, and other sources of Arrow streams."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from ...checks import shown

Tabular: TypeAlias = pl.DataFrame | pl.LazyFrame | Mapping[str, Any] | Any
"""The types that `frame_of` takes. `Any` is for frames of pandas, whose types need not be known here."""
KINDS = "a frame of polars or pandas, an Arrow table, or a dict of columns"
"""The types that `frame_of` takes, for messages."""


def frame_of(data: Any, where: str) -> pl.DataFrame | pl.LazyFrame | None:
    """Return rows as a polars frame; None if `data` contains no rows in memory.

    NaN in a frame of pandas becomes null, its meaning in pandas. The index is left out.

    Args:
        data: Any object.
        where: The beginning of error messages.

    Raises:
        TypeError: `data` has rows, and polars has no type for a column.
    """
    if isinstance(data, (pl.DataFrame, pl.LazyFrame)):
        return data
    try:
        if isinstance(data, Mapping):
            return pl.DataFrame({str(name): series_of(column) for name, column in data.items()}, strict=False)
        if _is_pandas(data) and hasattr(data, "columns"):
            return pl.from_pandas(data.rename(columns=str))
        if isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        if hasattr(data, "__arrow_c_stream__"):
            return pl.DataFrame(pa.table(data))
    except (pl.exceptions.PolarsError, pa.ArrowException, TypeError, ValueError) as error:
        raise TypeError(f"{where}: polars cannot read this {type(data).__name__}: {error}") from error
    return None


def require_frame(data: Any, where: str) -> pl.DataFrame | pl.LazyFrame:
    """Return the frame of `data`, as `frame_of` does; raise `TypeError` if `frame_of` returns None."""
    frame = frame_of(data, where)
    if frame is None:
        raise TypeError(f"{where} must be {KINDS}, got {type(data).__name__}")
    return frame


def series_of(column: Any, name: str = "") -> pl.Series:
    """Return a column as a polars series: from polars, pandas, Arrow, NumPy, torch, or any sequence.

    Raises:
        TypeError: It is no column, but a frame, a dict or a single value; or its values are of several types.
    """
    what = f"`{name}`" if name else "a column"
    if isinstance(column, pl.Series):
        return column
    if isinstance(column, (Mapping, pl.DataFrame, pl.LazyFrame, pa.Table)) or (
        _is_pandas(column) and hasattr(column, "columns")
    ):
        raise TypeError(f"{what} must be a column of values, got a {type(column).__name__}: give one of its columns")
    if _is_pandas(column) and hasattr(column, "__len__"):
        pandas = sys.modules["pandas"]
        known = isinstance(column, (pandas.Series, pandas.Index))  # and not an array, as `unique` of a column returns
        values: Any = pl.from_pandas(column if known else pandas.Series(column))
        assert isinstance(values, pl.Series)
        return values
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        found = pl.from_arrow(column)
        assert isinstance(found, pl.Series)
        return found
    if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
        raise TypeError(f"{what} must be a list or another sequence of values, got {shown(column)}")
    if hasattr(column, "detach"):  # a tensor; torch need not be imported to know one
        column = column.detach().cpu().numpy()
    if not isinstance(column, Iterable):
        raise TypeError(f"a column must be a sequence of values, got {column!r}: for one value, give [{column!r}]")
    try:
        return pl.Series(name, column if isinstance(column, np.ndarray) else list(column))
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        why = str(error).partition("\n")[0]
        raise TypeError(f"{what} must hold values of one type: {why}") from error


def _is_pandas(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "pandas"

"""The positions of ids in a column of known ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from ..io.frames import series_of
from ..loader.columns import Ragged

WORDS = (pl.Categorical, pl.Enum)
"""The types of categories, which are ids as strings are."""


def codes_of(ids: pl.Series, known: pl.Series) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the position of each id in `known`, -1 for an unknown id. Integers match floats without a fraction, and
    strings match categories.

    Raises:
        TypeError: The ids are of a different type, such as strings if integers are known.
    """
    ids, known = (one.cast(pl.String) if one.dtype in WORDS else one for one in (ids, known))
    if known.dtype.is_integer() and ids.dtype.is_numeric():
        # An integer that the type of `known` cannot hold is one that is not there.
        wide = pl.Int128() if pl.UInt64() in (ids.dtype, known.dtype) or ids.dtype.is_float() else pl.Int64()
        if ids.dtype.is_float():
            id = pl.col("id")
            ids = ids.alias("id").to_frame().select(pl.when(id.is_finite() & (id == id.floor())).then(id))["id"]
        ids, known = ids.cast(wide, strict=False), known.cast(wide)
    if ids.dtype != known.dtype:
        if ids.dtype == pl.Null or not len(ids):
            return np.full(len(ids), -1)
        raise TypeError(f"ids must be {known.dtype}, as in the log or index, got {ids.dtype}")
    places = pl.DataFrame({"id": known}).with_row_index("place")
    found = pl.DataFrame({"id": ids}).join(places, on="id", how="left", maintain_order="left")["place"]
    return found.cast(pl.Int64).fill_null(-1).to_numpy(writable=True)


def places_of(lists: Sequence[Sequence[Any]] | pl.Series, known: pl.Series) -> Ragged:
    """Replace lists of ids by lists of positions in `known`: each id once, in order, -1 for an unknown id, without
    nulls.

    Raises:
        TypeError: The argument does not have lists, or the ids are of a different type.
    """
    column = series_of(lists).alias("id")
    if not isinstance(column.dtype, pl.List) and len(column):
        raise TypeError(f"ids must be a list for each row, got {column.dtype}")
    rows = column.cast(pl.List(known.dtype)) if not len(column) else column
    flat = rows.to_frame().with_row_index("row").explode("id").drop_nulls("id")
    if flat["id"].dtype.is_float():
        flat = flat.filter(pl.col("id").is_not_nan())
    flat = flat.unique(maintain_order=True)
    lengths = np.bincount(flat["row"].to_numpy(), minlength=len(column))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(torch.from_numpy(codes_of(flat["id"], known)), torch.from_numpy(offsets))

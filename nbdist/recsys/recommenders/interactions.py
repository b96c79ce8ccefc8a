"""A log as codes: which users took which items, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..io.frames import Tabular, require_frame, series_of
from ..loader.columns import Ragged


@dataclass(frozen=True, eq=False)
class Interactions:
    """A log whose users and items are numbered in the order of their ids."""

    users: pl.Series
    """Raw ids; a user's code is the place."""
    items: pl.Series
    """Raw ids; an item's code is the place."""
    taken: Ragged
    """The items of each user, by code, each once, in rising order."""
    item_of_row: Tensor
    """Code of each row of the log, int64, shape (rows,)."""
    time_of_row: Tensor | None
    """Time of each row, float64, shape (rows,), in units of the time column, NaN where unknown. None: no times."""

    @classmethod
    def of(cls, log: Tabular, user: str, item: str, time: str | None) -> Interactions:
        """Number the users and items of a log.

        Raises:
            TypeError: `log` is no frame, or a column is of lists or floats.
            ValueError: A column is missing, an id is null, or there are no rows.
        """
        columns = [user, item] + ([] if time is None else [time])
        rows = columns_of(log, *columns)
        for name in (user, item):
            check_no_nulls(rows[name])
            if rows[name].dtype.is_nested() or rows[name].dtype.is_float():
                raise TypeError(f"column {name!r} must be of integers, strings or dates, got {rows[name].dtype}")
        if not len(rows):
            raise ValueError("log must have rows, got none")
        users, items = rows[user].unique().sort(), rows[item].unique().sort()
        user_codes, item_codes = codes_of(rows[user], users), codes_of(rows[item], items)
        times = None
        if time is not None:
            times = torch.from_numpy(
                rows[time].to_physical().cast(pl.Float64).fill_null(np.nan).to_numpy(writable=True)
            )
        return cls(users, items, _lists(user_codes, item_codes, len(users)), torch.from_numpy(item_codes), times)


def check_no_nulls(ids: pl.Series) -> None:
    """Raise `ValueError` for a column of a log that holds a null."""
    if ids.null_count():
        raise ValueError(
            f"column {ids.name!r} must have no nulls, got {ids.null_count()} in {len(ids)} rows: filter them out first"
        )


def columns_of(log: Tabular, *columns: str) -> pl.DataFrame:
    """Read some columns of a log. Raises `ValueError` for one that is not there."""
    rows = require_frame(log, "log").lazy()
    there = rows.collect_schema()
    for name in columns:
        if name not in there:
            raise ValueError(f"log must have a column {name!r}, got {', '.join(map(repr, there))}")
    return rows.select(list(dict.fromkeys(columns))).collect()


def codes_of(ids: pl.Series, known: pl.Series) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the place of each id in `known`, -1 where it is not there."""
    if known.dtype.is_integer() and ids.dtype.is_integer():
        ids, known = ids.cast(pl.Int128), known.cast(pl.Int128)
    if ids.dtype != known.dtype:
        if not len(ids):
            return np.zeros(0, np.int64)
        raise TypeError(f"ids must be {known.dtype}, as those of the log, got {ids.dtype}")
    places = pl.DataFrame({"id": known}).with_row_index("place")
    found = pl.DataFrame({"id": ids}).join(places, on="id", how="left", maintain_order="left")["place"]
    return found.cast(pl.Int64).fill_null(-1).to_numpy(writable=True)


def lists_of(histories: Sequence[Sequence[Any]] | pl.Series, items: pl.Series) -> Ragged:
    """Return lists of raw ids as lists of codes, each once, in rising order; ids that are not known are left out."""
    lists = series_of(histories, "id").alias("id")
    if not isinstance(lists.dtype, pl.List):
        raise TypeError(f"histories must be a list of ids for each user, got {lists.dtype}")
    flat = lists.to_frame().with_row_index("row").explode("id").drop_nulls("id")
    ids = flat["id"].cast(items.dtype) if flat["id"].dtype == pl.Null else flat["id"]
    codes, rows = codes_of(ids, items), flat["row"].to_numpy()
    return _lists(rows[codes >= 0], codes[codes >= 0], len(lists))


def _lists(rows: Any, codes: Any, count: int) -> Ragged:
    """Return the codes of each of `count` rows, each once, in rising order."""
    pairs = pl.DataFrame({"row": rows, "code": codes}).unique().sort("row", "code")
    lengths = np.bincount(pairs["row"].to_numpy(), minlength=count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(torch.from_numpy(pairs["code"].cast(pl.Int64).to_numpy(writable=True)), torch.from_numpy(offsets))


def part_of(lists: Ragged, rows: Tensor) -> Ragged:
    """Return the lists of some rows, in their order."""
    lengths = lists.lengths[rows]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    return Ragged(lists.values[lists.offsets[:-1][rows].repeat_interleave(lengths) + within], offsets)


def sums_of(lists: Ragged, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each list the sum of the rows of a table that are in it, each times its weight."""
    return embedding_bag(
        lists.values, rows, lists.offsets, mode="sum", include_last_offset=True, per_sample_weights=weights
    )


def transposed(lists: Ragged, width: int) -> Ragged:
    """Return for each item the rows that have it, in rising order."""
    rows = torch.arange(len(lists.lengths)).repeat_interleave(lists.lengths)
    order = lists.values.argsort(stable=True)
    counts = lists.values.bincount(minlength=width)
    return Ragged(rows[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

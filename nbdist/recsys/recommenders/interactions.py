"""A log whose users and items are replaced by codes: which users took which items, and when."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..etl.inputs import Input
from ..io.frames import Tabular, require_frame
from ..io.inspection import NoRows
from ..loader.columns import Ragged
from ..retrieval.codes import WORDS, codes_of, places_of


@dataclass(frozen=True, eq=False)
class Interactions:
    """A log whose users and items are numbered in the order of their ids."""

    users: pl.Series
    """The raw ids of the users. A user's code is the index of the id."""
    items: pl.Series
    """The raw ids of the items. An item's code is the index of the id."""
    taken: Ragged
    """The distinct codes of the items of each user, in ascending order."""
    item_of_row: Tensor | None
    """The code of the item of each row of the log, int64, shape (rows,). None in a model that was loaded."""
    time_of_row: Tensor | None
    """The time of each row, float64, shape (rows,), in units of the time column, NaN if it is null. None: the log has
    no times."""

    @classmethod
    def of(cls, log: Tabular, user: str, item: str, time: str | None) -> Interactions:
        """Number the users and items of a log.

        Raises:
            TypeError: `log` is no frame, a column of ids is of lists or floats, or times are neither dates nor numbers.
            ValueError: A column is missing, an id is null, or there are no rows.
        """
        columns = [user, item] + ([] if time is None else [time])
        rows = columns_of(log, *columns)
        for name in (user, item):
            check_ids(rows[name])
        if not len(rows):
            raise ValueError("log must have rows, got none")
        users, items = rows[user].unique().sort(), rows[item].unique().sort()
        user_codes, item_codes = codes_of(rows[user], users), codes_of(rows[item], items)
        times = None
        if time is not None:
            check_times(rows[time])
            times = torch.from_numpy(
                rows[time].to_physical().cast(pl.Float64).fill_null(np.nan).to_numpy(writable=True)
            )
        return cls(users, items, ragged_of(user_codes, item_codes, len(users)), torch.from_numpy(item_codes), times)


def check_no_nulls(ids: pl.Series) -> None:
    """Raise `ValueError` for a column of a log that holds a null."""
    if ids.null_count():
        raise ValueError(
            f"column {ids.name!r} must have no nulls, got {ids.null_count()} in {len(ids)} rows: filter them out first"
        )


def check_ids(ids: pl.Series) -> None:
    """Raise `ValueError` for a column of ids that holds a null, and `TypeError` for one of another type."""
    check_no_nulls(ids)
    dtype = ids.dtype
    if dtype.is_integer() or dtype.is_temporal() or dtype in (pl.String, *WORDS, pl.Boolean, pl.Null):
        return
    type_, name = ("pl.Int64", "'Int64'") if dtype.is_numeric() else ("pl.String", "str")
    raise TypeError(
        f"column {ids.name!r} must be of integers, strings or dates, got {dtype}: cast it, for example with "
        f"`cast({type_})` of polars or `astype({name})` of pandas"
    )


def check_times(times: pl.Series) -> None:
    """Raise `TypeError` for a column of times that has no order in time, such as strings."""
    if not (times.dtype.is_numeric() or times.dtype.is_temporal() or times.dtype == pl.Null):
        hint = (
            ": convert them, for example with `str.to_datetime` of polars or `to_datetime` of pandas"
            if times.dtype == pl.String
            else ""
        )
        raise TypeError(f"column {times.name!r} must be of dates, times or numbers, got {times.dtype}{hint}")


def check_ratings(ratings: pl.Series) -> None:
    """Raise `TypeError` for a column of ratings that are no numbers."""
    if not (ratings.dtype.is_numeric() or ratings.dtype in (pl.Boolean, pl.Null)):
        raise TypeError(f"column {ratings.name!r} must be of numbers or booleans, got {ratings.dtype}")


def columns_of(log: Tabular, *columns: str, optional: Sequence[str] = (), name: str = "log") -> pl.DataFrame:
    """Read some columns of a log, a frame or Parquet files, and the optional columns that it has.

    Raises `ValueError` for a column that is missing; `name` is the name of the log in errors.
    """
    try:
        rows = _source(log, name)
    except NoRows:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.Null))
    there = rows.schema if isinstance(rows, Input) else rows.collect_schema()
    for column in columns:
        if column not in there:
            raise ValueError(f"{name} must have a column {column!r}, got {', '.join(map(repr, there))}")
    names = list(dict.fromkeys([*columns, *(one for one in optional if one in there)]))
    if isinstance(rows, Input):
        found = rows.read(0, rows.rows, names, rows.rows, "streaming")
    else:
        found = rows.select(names).collect()
    return found.with_columns(pl.selectors.by_dtype(*WORDS).cast(pl.String))


def _source(log: Tabular, name: str) -> Input | pl.LazyFrame:
    paths: Any = log if isinstance(log, (list, tuple)) and log else [log]
    if all(isinstance(one, (str, os.PathLike)) for one in paths):
        return Input.of_files(paths)
    return require_frame(log, name).lazy()


def lists_of(histories: Sequence[Sequence[Any]] | pl.Series, items: pl.Series) -> Ragged:
    """Replace lists of raw ids by lists of their codes, distinct and in ascending order. Unknown ids are left out."""
    places = places_of(histories, items)
    rows = rows_of_values(places)
    known = places.values >= 0
    return ragged_of(rows[known].numpy(), places.values[known].numpy(), len(places.lengths))


def ragged_of(rows: Any, codes: Any, count: int) -> Ragged:
    """Return the distinct codes of each of `count` rows, in ascending order."""
    pairs = pl.DataFrame({"row": rows, "code": codes}).unique().sort("row", "code")
    lengths = np.bincount(pairs["row"].to_numpy(), minlength=count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(torch.from_numpy(pairs["code"].cast(pl.Int64).to_numpy(writable=True)), torch.from_numpy(offsets))


def part_of(lists: Ragged, rows: Tensor) -> Ragged:
    """Return the lists of some rows, in the order of `rows`. Row -1 gives an empty list."""
    lengths = (lists.offsets[rows + 1] - lists.offsets[rows]) * (rows >= 0)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    return Ragged(lists.values[lists.offsets[rows].repeat_interleave(lengths) + within], offsets)


def rows_of_values(lists: Ragged) -> Tensor:
    """Return, for each value, the number of the list that contains it."""
    return torch.arange(len(lists.lengths)).repeat_interleave(lists.lengths)


def together(first: Ragged, second: Ragged) -> Ragged:
    """Return for each row the distinct codes of both lists, in ascending order."""
    rows = torch.cat([rows_of_values(first), rows_of_values(second)])
    return ragged_of(rows.numpy(), torch.cat([first.values, second.values]).numpy(), len(first.lengths))


def sums_of(lists: Ragged, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return for each list the weighted sum of the table's rows whose numbers are in the list."""
    return embedding_bag(
        lists.values, rows, lists.offsets, mode="sum", include_last_offset=True, per_sample_weights=weights
    )


def transposed(lists: Ragged, width: int) -> Ragged:
    """Return for each item the rows whose list has the item, in ascending order."""
    rows = rows_of_values(lists)
    order = lists.values.argsort(stable=True)
    counts = lists.values.bincount(minlength=width)
    return Ragged(rows[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

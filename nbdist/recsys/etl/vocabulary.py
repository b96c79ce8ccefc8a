"""Vocabularies: the code of each value of a column, by its frequency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl
import torch

from .direct_table import DirectTable
from .hashing import hashed

NULL_CODE, UNSEEN_CODE = 0, 1
"""The codes of null and of a value that is not in the vocabulary. If there are several codes for such values, the
second is the first of them."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The known values of a categorical column, or of the lists in it.

    Code 0 is null, 1 is any unknown value, 2 the most frequent known value, and so on. With several buckets, an unknown
    value has one of the codes 1 to `num_buckets`, by its hash, and the codes of known values follow. In a column of
    lists every element has a code, and a null list becomes a list with the code 0.

    With `time_to_live`, a value that has not been seen for that number of fits is unknown again, and its code is free
    for a new value.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> rows = pl.DataFrame({"user": ["ann", "bob", "bob", None]})
        >>> vocabulary = Workflow(Categorify("user")).fit(rows).vocabularies["user"]
        >>> vocabulary.mapping()
        {'bob': 2, 'ann': 3}
        >>> vocabulary.size, vocabulary.counts.to_list(), vocabulary.nulls
        (4, [2, 1], 1)
    """

    values: pl.Series
    """The known values, the most frequent first; equally frequent values are in ascending order. Values that a later
    `fit` has added take the free codes, and then follow, in the same order. Value i has code i + `first_code`; null is
    a free code."""
    counts: pl.Series
    """The number of occurrences of each value since it has its code; int64."""
    lists: bool
    """True if the column holds lists."""
    nulls: int
    """The number of occurrences of code 0."""
    bucket_counts: pl.Series
    """The number of occurrences of each of the codes 1 to `num_buckets`, which are values too rare to be known."""
    ages: pl.Series | None = None
    """The number of fits since each value was seen, int64. None: values keep their codes."""
    waiting: pl.DataFrame | None = None
    """The values that have no code yet: `value`, `count` (the number of occurrences), `age` (as in `ages`). None: they
    are not recorded."""

    @classmethod
    def of(
        cls,
        counted: pl.DataFrame,
        lists: bool,
        min_count: int,
        max_size: int | None,
        num_buckets: int,
        previous: Vocabulary | None,
        time_to_live: int | None = None,
    ) -> Vocabulary:
        """Make the vocabulary of counted values.

        Args:
            counted: A frame with the columns `value`, in which each value, also null, occurs once, and `count`.
            lists: Whether the column has lists of values.
            min_count: The smallest count for a value to be known. Rarer values get the code of unseen values.
            max_size: The largest number of codes, including null and unseen. None: any number.
            num_buckets: The number of codes for unknown values.
            previous: An earlier vocabulary. Its values keep their codes, and its counts are added.
            time_to_live: The number of fits without a value after which its code is free. None: codes are never freed,
                and `min_count` compares the occurrences in one fit.
        """
        seen = counted.drop_nulls("value").select("value", "count")
        total, waits = seen, time_to_live is not None and min_count > 1
        if waits:
            total = _with_waiting(seen, None if previous is None else previous.waiting)
        frequent = total.filter(pl.col("count") >= min_count)
        new = (seen.join(frequent, on="value", how="semi") if waits else frequent).sort(
            "count", "value", descending=[True, False]
        )
        new = new.with_columns(age=pl.lit(0, pl.Int64))
        old = new.clear()
        if previous is not None:
            values = previous.values.cast(seen.schema["value"])  # integers of a different type
            ages = previous.ages if previous.ages is not None else pl.zeros(len(values), pl.Int64, eager=True)
            old = pl.DataFrame({"value": values, "count": previous.counts, "age": ages})
            again = old.join(seen, on="value", how="left", maintain_order="left")["count_right"].fill_null(0)
            old = old.with_columns(pl.col("count") + again, age=pl.when(again > 0).then(0).otherwise(pl.col("age") + 1))
            new = new.join(old, on="value", how="anti", maintain_order="left")
            if time_to_live is not None:
                gone = pl.col("age") >= time_to_live
                old = old.with_columns(
                    pl.when(~gone).then("value"), pl.when(gone).then(0).otherwise("count").alias("count")
                )
                old, new = _placed(old, new)
        if max_size is not None:
            new = new.head(max(0, max_size - 1 - num_buckets - len(old)))
        kept = pl.concat([old, new]).rechunk()
        left = seen.join(kept, on="value", how="anti").group_by(
            bucket=_bucket(pl.col("value"), kept.schema["value"], num_buckets)
        )
        filled = dict(left.agg(pl.col("count").sum()).iter_rows())
        buckets = pl.Series("count", [filled.get(1 + i, 0) for i in range(num_buckets)], pl.Int64)
        nulls = int(counted.filter(pl.col("value").is_null())["count"].sum())
        if previous is not None:
            nulls, buckets = nulls + previous.nulls, buckets + previous.bucket_counts
        waiting = None
        if waits:
            waiting = total.filter(pl.col("age") < time_to_live).join(kept, on="value", how="anti").sort("value")
        return cls(kept["value"], kept["count"], lists, nulls, buckets, kept["age"] if time_to_live else None, waiting)

    @property
    def num_buckets(self) -> int:
        """The number of codes for unknown values."""
        return len(self.bucket_counts)

    @property
    def first_code(self) -> int:
        """The code of the first known value."""
        return UNSEEN_CODE + self.num_buckets

    @property
    def unseen(self) -> int:
        """The number of occurrences in `fit` of values that are too rare to be in the vocabulary."""
        return int(self.bucket_counts.sum())

    @property
    def size(self) -> int:
        """The number of codes, including null and unseen: the rows that an embedding table needs."""
        return len(self.values) + self.first_code

    def mapping(self) -> dict[Any, int]:
        """The code of each known value, as plain Python."""
        codes = enumerate(self.values.to_list(), self.first_code)
        return {value: code for code, value in codes if value is not None}

    def shares(self) -> torch.Tensor:
        """Return the share of each code in all rows that `fit` saw, or in all elements of lists.

        The result has shape (size,). It is the probability of a code in a random training row; see
        `recsys.models.softmax_logits`.
        """
        counts = torch.from_numpy(pl.concat([self.bucket_counts, self.counts]).to_numpy(writable=True))
        counts = torch.cat([torch.tensor([self.nulls]), counts]).double()
        return (counts / counts.sum()).float()

    def unknown_weights(self) -> torch.Tensor:
        """Return the weight of each row of a table in the vector of an unknown value; shape (size,). The sum is 1.

        If `fit` saw unknown values, the vector is the mean of the rows that they have trained. Otherwise it is the mean
        of the known values' rows, weighted by their counts. For tables that grow, see `Sharded.load`.
        """
        weights = torch.zeros(self.size, dtype=torch.float64)
        if self.unseen or not int(self.counts.sum()):
            weights[UNSEEN_CODE : self.first_code] = 1 / self.num_buckets
        else:
            weights[self.first_code :] = torch.from_numpy(self.counts.to_numpy(writable=True))
        return (weights / weights.sum()).float()

    def renewed(self, previous: Vocabulary) -> torch.Tensor:
        """Return the codes, int64, whose value differs from the value in an earlier vocabulary. A free code has no
        value.
        """
        before, now = (one.values.cast(self.values.dtype) for one in (previous, self))
        places = before.ne_missing(now.head(len(before))).arg_true()
        return torch.from_numpy(places.cast(pl.Int64).to_numpy(writable=True)) + self.first_code

    def encode(self, frame: pl.LazyFrame, column: str, codes: str) -> pl.LazyFrame:
        """Add a column `codes` to a frame, with the codes of `column`: int64, or lists of int64, without nulls.

        The order of the rows does not change. The frame may also get columns that are only used here.
        """
        dtype: Any = frame.collect_schema()[column]
        dtype = dtype.inner if self.lists else dtype
        if not dtype.is_integer():
            dtype = self.values.dtype  # strings for categories
        table = self._codes.rename({"value": f"value of {codes}", "code": codes})
        if self.lists:
            table, value = keyed_like(table, {f"value of {codes}": dtype}), pl.element()
            known = value.cast(dtype).replace_strict(
                table.to_series(),
                table[codes],
                default=_bucket(value, dtype, self.num_buckets),
                return_dtype=pl.Int64,
            )
            lists = pl.col(column).list.eval(pl.when(value.is_not_null()).then(known).otherwise(NULL_CODE))
            return frame.with_columns(self.filled(lists).alias(codes))
        here, unknown = pl.col(column).is_not_null(), _bucket(pl.col(column), dtype, self.num_buckets)
        if self._by_position is not None:  # no other column is touched then
            known = self._by_position.get("code", pl.col(column)).fill_null(unknown)
            return frame.with_columns(pl.when(here).then(known).otherwise(NULL_CODE).alias(codes))
        # A join, which takes a third of the time of replace_strict.
        values = keyed_like(table, {f"value of {codes}": dtype}).lazy()
        key = pl.col(column).cast(dtype)
        joined = frame.join(values, left_on=key, right_on=f"value of {codes}", how="left", maintain_order="left")
        return joined.with_columns(
            pl.when(here).then(pl.col(codes).fill_null(unknown)).otherwise(NULL_CODE).alias(codes)
        )

    @cached_property
    def _by_position(self) -> DirectTable | None:
        return DirectTable.of(self._codes["value"], self._codes.select("code"))

    @property
    def _codes(self) -> pl.DataFrame:
        """The known values, `value`, with their codes, `code`."""
        codes = pl.int_range(self.first_code, self.size, dtype=pl.Int64, eager=True)
        return pl.DataFrame({"value": self.values, "code": codes}).drop_nulls("value")

    def __getstate__(self) -> dict[str, Any]:
        # What is left out is made again where the vocabulary arrives.
        return {name: value for name, value in self.__dict__.items() if name != "_by_position"}

    def filled(self, codes: pl.Expr) -> pl.Expr:
        """Replace nulls by the code of null."""
        return codes.fill_null(pl.lit([NULL_CODE], pl.List(pl.Int64)) if self.lists else pl.lit(NULL_CODE, pl.Int64))


def _with_waiting(seen: pl.DataFrame, before: pl.DataFrame | None) -> pl.DataFrame:
    """Return the values of a fit together with earlier values that have no code yet: each with its number of
    occurrences since it has been waiting for a code, and the number of fits since it was last seen.
    """
    now = seen.with_columns(age=pl.lit(0, pl.Int64))
    if before is None:
        return now
    before = before.with_columns(pl.col("value").cast(seen.schema["value"]), pl.col("age") + 1)
    return pl.concat([now, before]).group_by("value").agg(pl.col("count").sum(), pl.col("age").min())


def _placed(old: pl.DataFrame, new: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Place new values at the free codes, where the old values are null. Return the old values with these changes, and
    the new values that are left.
    """
    free = old["value"].is_null().arg_true().head(len(new))
    taken = new.head(len(free)).with_columns(place=free.cast(pl.Int64))
    numbered = old.with_columns(place=pl.int_range(pl.len(), dtype=pl.Int64))
    kept = numbered.join(taken, on="place", how="anti")
    return pl.concat([kept, taken]).sort("place").drop("place"), new.slice(len(free))


def _bucket(value: pl.Expr, dtype: pl.DataType, num_buckets: int) -> pl.Expr:
    """Return the code of each value that is not in a vocabulary with values of type `dtype`."""
    if num_buckets == 1:
        return pl.lit(UNSEEN_CODE, pl.Int64)
    return (hashed(value.cast(dtype), dtype) % num_buckets).cast(pl.Int64) + UNSEEN_CODE


def keyed_like(table: pl.DataFrame, types: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return a table whose integer keys have the types of other columns, for a comparison.

    A row whose key does not fit into the other type is removed, because no value there can be equal to it.
    """
    casts = {name: one for name, one in types.items() if one.is_integer() and table.schema[name] != one}
    if not all(table.schema[name].is_integer() for name in casts) or not casts:
        return table
    cast = [pl.col(name).cast(one, strict=False) for name, one in casts.items()]
    fits = [one.is_null() == pl.col(name).is_null() for name, one in zip(casts, cast, strict=True)]
    return table.filter(pl.all_horizontal(fits)).with_columns(cast)


def value_type(dtype: pl.DataType, where: str) -> pl.DataType:
    """Return the type of the values in a categorical column of type `dtype`; raise `ValueError` if it has none."""
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    if isinstance(inner, (pl.Categorical, pl.Enum)):
        return pl.String()
    dates = isinstance(inner, (pl.Date, pl.Datetime))
    if isinstance(inner, pl.DataType) and (inner.is_integer() or inner in (pl.Boolean, pl.String) or dates):
        return inner
    advice = "make it one of these with a Compute before"
    if isinstance(inner, pl.DataType) and inner.is_float():
        advice = "cast it, in pandas with astype('Int64') where some values are missing, or take Bucketize"
    raise ValueError(
        f"{where} is {dtype}, which cannot be categorified: integers, strings, booleans, dates, and lists of them can; "
        f"{advice}"
    )

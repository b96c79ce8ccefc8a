"""Codes for values, ordered by their frequency in the training rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from ..counting import Counts, count_values
from ..kernels import Kernel
from ..vocabulary import Vocabulary, value_type
from .join import codes_column, origin
from .step import Query, Saved, Stage, State, Step, TrainingRows, names_of, require, require_integer, type_name


class Categorify(Step):
    """Replace values by codes, the most frequent values first; in lists, each element by its code.

    Code 0 is null, 1 an unknown value, 2 the most frequent value seen by `Workflow.fit`, and so on; equally frequent
    values are in ascending order. A null list becomes a list with the code 0; an empty list stays empty. Codes are
    int64. If no training row has code 0 or 1, the rows of a table for them are not trained: see `fill_unknown`.

    Args:
        *columns: Columns of integers, strings, booleans, categoricals, dates, or lists of these. Columns in a tuple or
            list share one vocabulary, such as a movie and the movies seen before it: ``Categorify("user", ("movie",
            "seen"))``.
        min_count: The smallest number of rows for a value to be in the vocabulary. It may be a mapping from columns to
            numbers; of columns that share a vocabulary, name one.
        max_size: The largest number of codes of a column, including null and unknown values: the rarest values are left
            out. None: any number. It may be a mapping from columns to numbers.
        num_buckets: The number of codes for values that are not in the vocabulary. If there are several, the hash of a
            value selects one, and the codes of known values begin with 1 + num_buckets. With ``num_buckets=n,
            max_size=n + 1`` there is no vocabulary: each value is hashed. It may be a mapping from columns to numbers.
        time_to_live: The number of calls of `fit` with `previous=`, such as days, without a row of a value after which
            the value is unknown again, and its code is free for a new value. `min_count` then counts the rows of all
            calls, until a value has no row for so long. None: codes never change, and `min_count` counts the rows of
            one call. It may be a mapping from columns to numbers. See `Vocabulary.renewed`.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> rows = pl.DataFrame({"user": ["ann", "bob", "bob", "eve", "eve"]})
        >>> workflow = Workflow(Categorify("user", min_count=2)).fit(rows)
        >>> workflow.transform(pl.DataFrame({"user": ["eve", "bob", "ann", None]})).collect()["user"].to_list()
        [3, 2, 1, 0]
        >>> rows = pl.DataFrame({"movie": ["Alien", "Solaris"], "seen": [["Stalker"], ["Stalker", "Alien"]]})
        >>> workflow = Workflow(Categorify(("movie", "seen"))).fit(rows)
        >>> workflow.transform(rows).collect().rows()
        [(2, [3]), (4, [3, 2])]
    """

    kind = "categorify"

    def __init__(
        self,
        *columns: str | Sequence[str],
        min_count: int | Mapping[str, int] = 1,
        max_size: int | Mapping[str, int] | None = None,
        num_buckets: int | Mapping[str, int] = 1,
        time_to_live: int | Mapping[str, int] | None = None,
    ) -> None:
        self.groups = [names_of(group) for group in columns]
        """The columns of each vocabulary."""
        self.adds = self.learns = names_of([name for group in self.groups for name in group])
        self.min_count: dict[str, int] = self._each("min_count", min_count, 1)
        self.max_size: dict[str, int | None] = self._each("max_size", max_size, None)
        self.num_buckets: dict[str, int] = self._each("num_buckets", num_buckets, 1)
        self.time_to_live: dict[str, int | None] = self._each("time_to_live", time_to_live, None)
        for name, time in self.time_to_live.items():
            if time is not None and require_integer(time, "Categorify: time_to_live") < 1:
                raise ValueError(f"Categorify: `time_to_live` of column {name!r} must be at least 1, got {time}")
        for name in self.adds:
            for what, value in (("min_count", self.min_count[name]), ("num_buckets", self.num_buckets[name])):
                if require_integer(value, f"Categorify: {what}") < 1:
                    raise ValueError(f"Categorify: `{what}` of column {name!r} must be at least 1, got {value}")
            size, least = self.max_size[name], 1 + self.num_buckets[name]
            if size is not None and require_integer(size, "Categorify: max_size") < least:
                raise ValueError(
                    f"Categorify: `max_size` of column {name!r} must be at least {least}, for null and "
                    + ("unseen" if least == 2 else f"{least - 1} buckets")
                    + f", got {size}"
                )

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        codes: dict[str, pl.DataType] = {}
        for group in self.groups:
            types: list[pl.DataType] = []
            for name in group:
                require(name, schema, f"{where}: Categorify")
                types.append(value_type(schema[name], f"{where}: Categorify: column {name!r}"))
                codes[name] = pl.List(pl.Int64()) if isinstance(schema[name], pl.List) else pl.Int64()
                if types[-1] != types[0]:
                    raise ValueError(
                        f"{where}: Categorify: {group[0]!r} and {name!r} share one vocabulary, but their types are "
                        f"{types[0]} and {types[-1]}: cast one of them"
                    )
        return pl.Schema({**schema, **codes})

    def apply(self, names: Sequence[str], state: State, training: bool, coded: Collection[str] = ()) -> Stage:
        """Return the codes of `names`, except for columns in `coded`, whose codes a `Join` has already added."""

        def run(frame: pl.LazyFrame) -> pl.LazyFrame:
            for name in names:
                vocabulary, codes = state.vocabularies[name], codes_column(name)
                columns = frame.collect_schema().names()
                if name not in coded:
                    frame = vocabulary.encode(frame, name, codes)
                filled = vocabulary.filled(pl.col(codes)).alias(name)
                frame = frame.select(filled if one == name else one for one in columns if one != codes)
            return frame

        return run

    def learn(self, rows: TrainingRows, state: State, previous: State) -> None:
        counts = {name: one for group in self.groups for one in [Counts()] for name in group}
        queries = [self._counting(rows, name) for name in self.adds]
        for found in rows.read(f"count {', '.join(self.adds)}", queries):
            for name, frame in zip(self.adds, found, strict=True):
                counts[name].add(frame)
        for group in self.groups:
            first, counted = group[0], counts[group[0]].everywhere()
            limits = self.min_count[first], self.max_size[first], self.num_buckets[first]
            before, time = previous.vocabularies.get(first), self.time_to_live[first]
            vocabulary = Vocabulary.of(counted, False, *limits, before, time)
            for name in group:
                state.vocabularies[name] = replace(vocabulary, lists=isinstance(rows.schema[name], pl.List))

    @staticmethod
    def _counting(rows: TrainingRows, name: str) -> Query:
        join = origin(rows.steps, name)
        if join is None:
            return Query([name], count_values(name, rows.schema[name]))
        return Query(join.on, count_values(name, rows.schema[name], join.table, join.on), join)

    def check_growth(self, schema: pl.Schema, previous: State) -> None:
        known = previous.vocabularies
        for group in self.groups:
            first = group[0]
            old = next((known[name] for name in group if name in known), None)
            if old is None:
                continue
            dtype, size, buckets = value_type(schema[first], "fit"), self.max_size[first], old.num_buckets
            why = ""
            if any(name not in known or not known[name].values.equals(old.values) for name in group):
                why = f"columns {', '.join(group)} had not one vocabulary together"
            elif dtype != old.values.dtype and not (dtype.is_integer() and old.values.dtype.is_integer()):
                why = f"its values were {old.values.dtype} and are {dtype}"
            elif old.values.cast(dtype, strict=False).null_count() > old.values.null_count():
                why = f"its values were {old.values.dtype}, and some of them do not fit into {dtype}"
            elif self.num_buckets[first] != buckets:
                why = f"it had num_buckets={buckets}, and has {self.num_buckets[first]}"
            elif size is not None and size < old.size:
                why = f"it had {old.size} codes, and max_size={size}"
            if why:
                raise ValueError(f"column {first!r} cannot keep the codes of the previous workflow: {why}")

    def num_codes(self, name: str, before: int | None, state: State) -> int:
        return state.vocabularies[name].size

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """`columns`: {column: {type, size, min_count, max_size, num_buckets, nulls, unseen, vocabulary}}.

        The file `vocabulary` has the columns `value` and `count`, and several columns may share it; the value in row i
        (from 0) has code i + 1 + num_buckets. size = rows + 1 + num_buckets; nulls and unseen: counts of code 0, and of
        the codes of unknown values; `buckets`, if there are several: the file with the `count` of each bucket. An
        unknown value has code 1 + hash modulo num_buckets, with the hash of `hashing.py`. In lists, each element has a
        code, and a null list becomes [0]. With `time_to_live`, the file `vocabulary` has a third column, `age`, the
        number of fits since the value was last seen, and a null value stands for a free code. If `min_count` is above 1
        as well, the file `waiting` has the same columns for values that have no code yet.
        """
        columns: dict[str, dict[str, Any]] = {}
        for i, name in ((i, name) for i, group in enumerate(self.groups) for name in group):
            vocabulary = state.vocabularies[name]
            inner = type_name(vocabulary.values.dtype)
            columns[name] = {
                "type": f"list[{inner}]" if vocabulary.lists else inner,
                "size": vocabulary.size,
                "min_count": self.min_count[name],
                "max_size": self.max_size[name],
                "num_buckets": self.num_buckets[name],
                "nulls": vocabulary.nulls,
                "unseen": vocabulary.unseen,
                "vocabulary": f"vocabulary-{number}-{i}.parquet",
            }
            if self.time_to_live[name] is not None:
                columns[name]["time_to_live"] = self.time_to_live[name]
            if vocabulary.waiting is not None:
                columns[name]["waiting"] = f"vocabulary-{number}-{i}-waiting.parquet"
            if self.num_buckets[name] > 1:
                columns[name]["buckets"] = f"vocabulary-{number}-{i}-buckets.parquet"
        return {"columns": columns}

    def files(self, described: Mapping[str, Any], state: State) -> dict[str, pl.DataFrame]:
        tables = {}
        for name, column in described["columns"].items():
            one = state.vocabularies[name]
            ages = {} if one.ages is None else {"age": one.ages}
            tables[column["vocabulary"]] = pl.DataFrame({"value": one.values, "count": one.counts, **ages})
            if one.waiting is not None:
                tables[column["waiting"]] = one.waiting
            if "buckets" in column:
                tables[column["buckets"]] = one.bucket_counts.to_frame("count")
        return tables

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Categorify:
        groups: dict[str, list[str]] = {}
        columns = described["columns"]
        counts = {"count": pl.Int64()}
        for name, one in columns.items():
            types: dict[str, Any] = {"value": None, **counts}
            types |= {"age": pl.Int64} if "time_to_live" in one else {}
            frame, lists = saved.table(one["vocabulary"], types), one["type"].startswith("list[")
            value_type(frame.schema["value"], f"{one['vocabulary']}: `value`")
            buckets = pl.Series("count", [one["unseen"]], pl.Int64)
            if "buckets" in one:
                buckets = saved.table(one["buckets"], counts)["count"]
            free = frame["value"].has_nulls() and "age" not in types
            if free or frame["value"].drop_nulls().is_duplicated().any() or len(buckets) < 1:
                raise ValueError(f"{one['vocabulary']}: each `value` must occur once, and none may be null")
            for seen in (frame["count"], buckets, pl.Series([require_integer(one["nulls"], "nulls")])):
                if seen.has_nulls() or (seen < 0).any():
                    raise ValueError(f"{one['vocabulary']}: counts must be at least 0")
            ages = frame["age"] if "age" in types else None
            waiting = saved.table(one["waiting"], types) if "waiting" in one else None
            saved.state.vocabularies[name] = Vocabulary(
                frame["value"], frame["count"], lists, one["nulls"], buckets, ages, waiting
            )
            groups.setdefault(one["vocabulary"], []).append(name)
        limits = {
            what: {name: one.get(what, 1) for name, one in columns.items()}  # version 1 had no num_buckets
            for what in ("min_count", "max_size", "num_buckets")
        }
        limits["time_to_live"] = {name: one["time_to_live"] for name, one in columns.items() if "time_to_live" in one}
        return cls(*groups.values(), **limits)

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        known = {name: state.vocabularies[name] for name in names}
        return [
            Kernel("Categorify", [name], [name], {"num_buckets": one.num_buckets}, {"vocabulary": [one.values]})
            for name, one in known.items()
        ]

    def __repr__(self) -> str:
        groups = [group[0] if len(group) == 1 else tuple(group) for group in self.groups]
        options = f"min_count={self.min_count}, max_size={self.max_size}, num_buckets={self.num_buckets}"
        if times := {name: time for name, time in self.time_to_live.items() if time is not None}:
            options += f", time_to_live={times}"
        return f"Categorify({groups}, {options})"

    def _each(self, what: str, value: Any, default: Any) -> dict[str, Any]:
        """Return the value of an option for each column, given one value for all columns, or a mapping.

        Columns with a common vocabulary get the same value.
        """
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.adds, value)
        for name in value:
            require(name, self.adds, f"Categorify: {what}")
        each = {}
        for group in self.groups:
            said = {name: value[name] for name in group if name in value}
            if len(set(said.values())) > 1:
                raise ValueError(f"Categorify: `{what}` must be equal for columns that share a vocabulary, got {said}")
            each.update(dict.fromkeys(group, next(iter(said.values()), default)))
        return each

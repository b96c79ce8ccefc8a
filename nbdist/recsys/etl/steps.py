"""The steps of a workflow: join, categorify, compute, drop. What each needs, what it makes of the columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from ..io import remote
from ..io.storage import Paths, find
from . import expressions
from .vocabulary import value_type


class Step:
    """One step. It is the same object before and after `fit`: what is learnt is the workflow's."""

    adds: Sequence[str] = ()
    """The columns that it adds or replaces."""

    def needs(self, wanted: set[str]) -> set[str]:
        """The columns that must be there before it, for `wanted` to be there after it."""
        return wanted

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        """The columns after it, where those before it are `schema`.

        Raises:
            ValueError: beginning with `where` and naming the column: it cannot be done.
        """
        raise NotImplementedError


class Join(Step):
    """Add columns of another table: each row gets those of the table's row with the same key, or nulls.

    Args:
        table: A polars frame, or Parquet files; held in memory.
        on: The key, a column or several, in the rows as in the table. In the table each key occurs once; a null
            matches nothing.
        columns: Which columns to add. None: all but the key.

    Raises:
        FileNotFoundError, ValueError: naming file and column: not there, not Parquet, or a key that occurs twice.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Join, Workflow
        >>> rows = pl.DataFrame({"movie": [20, 30, 10]})
        >>> movies = pl.DataFrame({"movie": [10, 20], "genre": ["war", "drama"]})
        >>> workflow = Workflow(Join(movies, on="movie")).fit(rows)
        >>> workflow.lazy(rows).collect().rows()
        [(20, 'drama'), (30, None), (10, 'war')]
    """

    def __init__(
        self,
        table: pl.DataFrame | pl.LazyFrame | Paths,
        on: str | Sequence[str],
        columns: str | Sequence[str] | None = None,
    ) -> None:
        self.on = names_of(on)
        if isinstance(table, (pl.DataFrame, pl.LazyFrame)):
            frame, where = table.lazy(), "Join: the table"
        else:
            paths = find(table)
            where = f"Join: {os.fspath(paths[0])}"
            frame = pl.concat([remote.scan(path) for path in paths])
        there = _read(frame.head(0), where).columns
        self.adds = [name for name in there if name not in self.on] if columns is None else names_of(columns)
        for name in [*self.on, *self.adds]:
            require(name, there, where)
        if both := set(self.on) & set(self.adds):
            raise ValueError(f"{where}: column {min(both)!r} is the key and is there already")
        self.table = _read(frame.select([*self.on, *self.adds]).drop_nulls(self.on), where)
        twice = self.table.filter(pl.struct(self.on).is_duplicated()).head(1)
        if len(twice):
            raise ValueError(f"{where}: the key {twice.select(self.on).row(0, named=True)} occurs more than once")

    def needs(self, wanted: set[str]) -> set[str]:
        return wanted - set(self.adds) | (set(self.on) if wanted & set(self.adds) else set())

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name in self.on:
            require(name, schema, f"{where}: Join")
            if schema[name] != self.table.schema[name]:
                raise ValueError(
                    f"{where}: Join: column {name!r} is {schema[name]} in the rows and {self.table.schema[name]} in "
                    "the table: cast one of them"
                )
        for name in self.adds:
            if name in schema:
                raise ValueError(f"{where}: Join: column {name!r} of the table is in the rows already: say columns=")
        return pl.Schema({**schema, **{name: self.table.schema[name] for name in self.adds}})

    def __repr__(self) -> str:
        return f"Join({self.table.height} rows, on={self.on}, columns={self.adds})"


class Categorify(Step):
    """Replace values by codes, the most frequent values first; in lists, each element by its code.

    Code 0 is null, 1 a value that is not in the vocabulary, 2 the most frequent value seen by `Workflow.fit`, and so
    on; equally frequent values are in ascending order. A null list becomes a list of the one code 0; an empty list
    stays empty. Codes are int64. Where no training row has code 0 or 1, nothing trains their rows of a table: see
    `fill_unknown`.

    Args:
        *columns: Of integers, strings, booleans, categoricals, or lists of these. Several in a tuple or list have one
            vocabulary together, such as a movie and those seen before it: ``Categorify("user", ("movie", "seen"))``.
        min_count: Values seen less often are left out of the vocabulary; or a mapping from columns to that. Of columns
            with one vocabulary name any.
        max_size: Codes that a column may have, those of null and unknown values included: the rarest values are left
            out. None: any number. Or a mapping from columns to that.
        num_buckets: How many codes there are for values that are not in the vocabulary: with more than one, their hash
            decides, and what is known begins with code 1 + num_buckets. ``num_buckets=n, max_size=n + 1`` keeps no
            vocabulary at all: then each value is hashed. Or a mapping from columns to that.

    Raises:
        TypeError, ValueError: for arguments that make no sense.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> rows = pl.DataFrame({"user": ["ann", "bob", "bob", "eve", "eve"]})
        >>> workflow = Workflow(Categorify("user", min_count=2)).fit(rows)
        >>> workflow.lazy(pl.DataFrame({"user": ["eve", "bob", "ann", None]})).collect()["user"].to_list()
        [3, 2, 1, 0]
        >>> rows = pl.DataFrame({"movie": ["Alien", "Solaris"], "seen": [["Stalker"], ["Stalker", "Alien"]]})
        >>> workflow = Workflow(Categorify(("movie", "seen"))).fit(rows)
        >>> workflow.lazy(rows).collect().rows()
        [(2, [3]), (4, [3, 2])]
    """

    def __init__(
        self,
        *columns: str | Sequence[str],
        min_count: int | Mapping[str, int] = 1,
        max_size: int | Mapping[str, int] | None = None,
        num_buckets: int | Mapping[str, int] = 1,
    ) -> None:
        self.groups = [names_of(group) for group in columns]
        """The columns of each vocabulary."""
        self.adds = names_of([name for group in self.groups for name in group])
        self.min_count: dict[str, int] = self._each("min_count", min_count, 1)
        self.max_size: dict[str, int | None] = self._each("max_size", max_size, None)
        self.num_buckets: dict[str, int] = self._each("num_buckets", num_buckets, 1)
        for name in self.adds:
            for what, value in (("min_count", self.min_count[name]), ("num_buckets", self.num_buckets[name])):
                if value < 1:
                    raise ValueError(f"Categorify: {what}={value} of column {name!r}: at least 1")
            size, least = self.max_size[name], 1 + self.num_buckets[name]
            if size is not None and size < least:
                raise ValueError(
                    f"Categorify: max_size={size} of column {name!r}: at least {least}, null and "
                    + ("unseen" if least == 2 else f"{least - 1} buckets")
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
                        f"{where}: Categorify: {group[0]!r} and {name!r} are to have one vocabulary, and their values "
                        f"are {types[0]} and {types[-1]}: cast one of them"
                    )
        return pl.Schema({**schema, **codes})

    def __repr__(self) -> str:
        groups = [group[0] if len(group) == 1 else tuple(group) for group in self.groups]
        options = f"min_count={self.min_count}, max_size={self.max_size}, num_buckets={self.num_buckets}"
        return f"Categorify({groups}, {options})"

    def _each(self, what: str, value: Any, default: Any) -> dict[str, Any]:
        """One value per column, out of one for all or a mapping; the same for columns with one vocabulary."""
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.adds, value)
        for name in value:
            require(name, self.adds, f"Categorify: {what}")
        each = {}
        for group in self.groups:
            said = {name: value[name] for name in group if name in value}
            if len(set(said.values())) > 1:
                raise ValueError(f"Categorify: {what}: {said}, but these columns have one vocabulary")
            each.update(dict.fromkeys(group, next(iter(said.values()), default)))
        return each


class Compute(Step):
    """Add or replace columns by polars expressions over a row: ``Compute(label=pl.col("rating") > 3)``.

    All of them see the columns as they were before the step.

    Args:
        **columns: The expressions. They may not depend on other rows (`Workflow.fit` sees to that), nor be random,
            nor hold Python functions.

    Raises:
        TypeError, ValueError: naming the column: no such expression.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Compute, Workflow
        >>> rows = pl.DataFrame({"rating": [5.0, 2.0]})
        >>> workflow = Workflow(Compute(label=pl.col("rating") > 3)).fit(rows)
        >>> workflow.lazy(rows).collect().rows()
        [(5.0, True), (2.0, False)]
    """

    def __init__(self, **columns: pl.Expr) -> None:
        if not columns:
            raise ValueError("Compute: no columns")
        for name, expression in columns.items():
            expressions.check(expression, f"Compute: column {name!r}")
        self.columns = columns
        self.adds = list(columns)

    def needs(self, wanted: set[str]) -> set[str]:
        made = {name: e for name, e in self.columns.items() if name in wanted}
        return (wanted - made.keys()).union(*(expressions.reads(expression) for expression in made.values()))

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name, expression in self.columns.items():
            for column in expressions.reads(expression):
                require(column, schema, f"{where}: Compute: column {name!r}")
            expressions.check_rows(expression, schema, f"{where}: Compute: column {name!r}")
        return pl.LazyFrame(schema=schema).with_columns(**self.columns).collect_schema()

    def __repr__(self) -> str:
        return f"Compute({', '.join(f'{name}={expression}' for name, expression in self.columns.items())})"


class Drop(Step):
    """Leave columns out.

    Args:
        *columns: Their names.

    Raises:
        TypeError, ValueError: for what is no name, a name given twice, or none at all.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Drop, Workflow
        >>> rows = pl.DataFrame({"user": [1], "timestamp": [881250949]})
        >>> Workflow(Drop("timestamp")).fit(rows).outputs
        {'user': 'int64'}
    """

    def __init__(self, *columns: str) -> None:
        self.columns = names_of(columns)

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name in self.columns:
            require(name, schema, f"{where}: Drop")
        return pl.Schema({name: dtype for name, dtype in schema.items() if name not in self.columns})

    def __repr__(self) -> str:
        return f"Drop({self.columns})"


def type_name(dtype: pl.DataType) -> str:
    """A type as the saved workflow has it: ``int64``, ``float32``, ``bool``, ``string``, ``list[string]``."""
    if isinstance(dtype, pl.List) and isinstance(dtype.inner, pl.DataType):
        return f"list[{type_name(dtype.inner)}]"
    if dtype.is_numeric() or dtype == pl.String:
        return str(dtype).lower()
    return "bool" if dtype == pl.Boolean else str(dtype)


def _read(frame: pl.LazyFrame, where: str) -> pl.DataFrame:
    try:
        return frame.collect()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{where}: {error}") from error


def names_of(columns: str | Sequence[str]) -> list[str]:
    """Names of columns; raises for what is no name, a name given twice, or none at all."""
    names = [columns] if isinstance(columns, str) else list(columns)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"columns are named by strings, and not by {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"column {name!r} is named twice")
    if not names:
        raise ValueError("no columns are named")
    return names


def require(name: str, columns: Any, where: str) -> None:
    """Raise `ValueError` where there is no such column."""
    if name not in columns:
        raise ValueError(f"{where}: there is no column {name!r}, but {', '.join(map(repr, columns))}")

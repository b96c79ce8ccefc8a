"""Columns of another table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from ...io import remote
from ...io.frames import Tabular, frame_of
from ...io.storage import Paths
from ..direct_table import DirectTable
from ..kernels import Kernel, lookup
from ..vocabulary import keyed_like
from .step import Saved, Stage, State, Step, names_of, require, type_name


class Join(Step):
    """Add columns of another table: each row gets the values of the table's row with the same key, or nulls.

    Args:
        table: A frame of polars or pandas, an Arrow table, a dict of columns, or Parquet files. It is held in memory.
        on: The key: one or several columns that both the rows and the table have. Integers may have different types.
            Each key must occur once in the table. Null matches no row.
        columns: The names of the columns to add. None: all except the key.

    Raises:
        FileNotFoundError, ValueError: A file or column is missing, a file is not Parquet, or a key occurs twice. The
            error names file and column.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Join, Workflow
        >>> rows = pl.DataFrame({"movie": [20, 30, 10]})
        >>> movies = pl.DataFrame({"movie": [10, 20], "genre": ["war", "drama"]})
        >>> workflow = Workflow(Join(movies, on="movie")).fit(rows)
        >>> workflow.transform(rows).collect().rows()
        [(20, 'drama'), (30, None), (10, 'war')]
    """

    kind = "join"

    def __init__(
        self,
        table: Tabular | Paths,
        on: str | Sequence[str],
        columns: str | Sequence[str] | None = None,
    ) -> None:
        self.on = names_of(on)
        known = frame_of(table, "Join: the table")
        if known is not None:
            frame, where = known.lazy(), "Join: the table"
        else:
            files: Any = table
            frame, first = remote.scan_all(files)
            where = f"Join: {os.fspath(first)}"
        there = _read(frame.head(0), where).columns
        self.adds = [name for name in there if name not in self.on] if columns is None else names_of(columns)
        for name in [*self.on, *self.adds]:
            require(name, there, where)
        if both := set(self.on) & set(self.adds):
            raise ValueError(f"{where}: column {min(both)!r} is the key, which the rows already have")
        self.table = _read(frame.select([*self.on, *self.adds]).drop_nulls(self.on), where)
        twice = self.table.filter(pl.struct(self.on).is_duplicated()).head(1)
        if len(twice):
            raise ValueError(f"{where}: the key {twice.select(self.on).row(0, named=True)} occurs more than once")

    def reads(self, name: str) -> list[str]:
        return self.on

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name in self.on:
            require(name, schema, f"{where}: Join")
            integers = schema[name].is_integer() and self.table.schema[name].is_integer()
            if schema[name] != self.table.schema[name] and not integers:
                raise ValueError(
                    f"{where}: Join: column {name!r} is {schema[name]} in the rows and {self.table.schema[name]} in "
                    "the table: cast one of them"
                )
        for name in self.adds:
            if name in schema:
                raise ValueError(
                    f"{where}: Join: column {name!r} of the table is in the rows already: choose the columns to add "
                    "with columns="
                )
        return pl.Schema({**schema, **{name: self.table.schema[name] for name in self.adds}})

    def apply(self, names: Sequence[str], state: State, training: bool, coded: Sequence[str] = ()) -> Stage:
        """Look up the columns `names`. For the columns in `coded`, also look up their codes, and put them into columns
        named by `codes_column`.
        """
        table = self.table.lazy()
        for name in coded:
            table = state.vocabularies[name].encode(table, name, codes_column(name))
        added = [*names, *map(codes_column, coded)]
        found = table.select(*self.on, *added).collect()
        direct = DirectTable.of(found[self.on[0]], found.select(added)) if len(self.on) == 1 else None
        if direct is not None:
            columns = {name: direct.get(name, pl.col(self.on[0])) for name in added}
            return lambda frame: frame.with_columns(**columns)
        found = found.rechunk()

        def run(frame: pl.LazyFrame) -> pl.LazyFrame:
            schema = frame.collect_schema()
            alike = keyed_like(found, {name: schema[name] for name in self.on})
            return frame.join(alike.lazy(), on=self.on, how="left", maintain_order="left")

        return run

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return `on`, the columns of the key; `columns`: {column: type} of the added columns; `table`, the file with
        both. Keys in the file are unique and not null. Rows with another key get nulls."""
        columns = {name: type_name(self.table.schema[name]) for name in self.adds}
        return {"on": self.on, "columns": columns, "table": f"table-{number}.parquet"}

    def files(self, described: Mapping[str, Any], state: State) -> dict[str, pl.DataFrame]:
        return {described["table"]: self.table}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Join:
        return cls(saved.table(described["table"]), described["on"], list(described["columns"]))

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        return [lookup(self.on, self.table.select(self.on), self.table.select(names))]

    def __repr__(self) -> str:
        return f"Join({self.table.height} rows, on={self.on}, columns={self.adds})"


def codes_column(name: str) -> str:
    """Return the name of the column for the codes of a column, until they replace it."""
    return f"{name} (codes, nbdist)"


def origin(steps: Sequence[Step], column: str) -> Join | None:
    """Return the join that has added a column, given the steps so far; None for columns of the input and computed
    columns.
    """
    for step in reversed(steps):
        if column in step.adds:
            return step if isinstance(step, Join) else None
    return None


def _read(frame: pl.LazyFrame, where: str) -> pl.DataFrame:
    try:
        return frame.collect()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{where}: {error}") from error

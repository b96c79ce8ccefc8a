"""The common part of steps that learn numbers from the training rows: passes over the rows, tables of sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from ..direct_table import DirectTable
from ..moments import COUNT, SQUARES, SUM, VALUE, Aggregate, Sums, columns_of, key, known, merged, squared_distances
from ..vocabulary import keyed_like, value_type
from .step import Query, Saved, Stage, State, Step, TrainingRows


class StatisticsStep(Step):
    """A step that learns one or more tables of sums, each under a name; `moments` describes such tables."""

    _numbers: Sequence[str]
    """The columns whose numbers are learned."""

    def _aggregates(self) -> dict[str, Aggregate]:
        """Return the sums to learn. The name of each is the name of a column that the step makes, or a part of it."""
        raise NotImplementedError

    def _learned(self, state: State, name: str) -> pl.DataFrame:
        """Return the learned table with this name."""
        return state.tables[self.kind, name]

    def learn(self, rows: TrainingRows, state: State, previous: State) -> None:
        for name, table in self._added_up(rows, self._aggregates()).items():
            self._keep(name, table, state, previous, rows.where)

    def _added_up(
        self,
        rows: TrainingRows,
        aggregates: Mapping[str, Aggregate],
        *more: pl.Expr,
        also: Callable[[pl.DataFrame], object] = lambda frame: None,
    ) -> dict[str, pl.DataFrame]:
        """Return the tables of some aggregates.

        Args:
            more: Computed keys, by the names that `key` returns.
            also: A function that is called with each part of the rows. Their columns have the names that `key` returns.
        """
        computed = {expression.meta.output_name() for expression in more}
        keys = {name for one in aggregates.values() for name in one.keys if key(name) not in computed}
        columns = sorted({*self._numbers, *keys})
        named = [*(pl.col(name).alias(key(name)) for name in columns), *more]
        roots = {name for expression in more for name in expression.meta.root_names()}
        queries = [Query([*columns, *roots], lambda frame: frame.select(named))]

        def added(aggregates: Mapping[str, Aggregate], means: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
            """Return the sums of the values. If the means are given, return the sums of squared distances from the
            means instead."""
            sums = {name: Sums(one.keys) for name, one in aggregates.items()}
            for (frame,) in rows.read(f"add up {', '.join(columns)}", queries):
                if not means:
                    also(frame)
                for name, one in aggregates.items():
                    values = _value(frame, one)
                    sums[name].add(squared_distances(values, means[name], one.keys) if means else values)
            return {name: one.everywhere() for name, one in sums.items()}

        tables = added(aggregates, {})
        squared = {name: one for name, one in aggregates.items() if one.squares}
        squares = added(squared, tables) if squared else {}
        # The tables of the same rows have the same keys, in the same order.
        no_squares = pl.lit(None, pl.Float64)
        return {
            name: table.with_columns((squares[name][SUM] if name in squares else no_squares).alias(SQUARES))
            for name, table in tables.items()
        }

    def _keep(self, name: str, table: pl.DataFrame, state: State, previous: State, where: str) -> None:
        """Store a table in the state, merged with the table of the previous workflow. Raise `ValueError` if the
        table contains no value.
        """
        one, before = self._aggregates()[name], previous.tables.get((self.kind, name))
        table = state.tables[self.kind, name] = table if before is None else merged([before, table], one.keys)
        if one.column is not None and not int(table[COUNT].sum()):
            raise ValueError(
                f"{where}: {type(self).__name__}: column {one.column!r} has no value to learn from: each is null, "
                "NaN, infinite or beyond 1e150"
            )

    def check_growth(self, schema: pl.Schema, previous: State) -> None:
        for name, one in self._aggregates().items():
            table = previous.tables.get((self.kind, name))
            if table is None:
                continue
            types = {key(each): value_type(schema[each], "fit") for each in one.keys}
            if {each: dtype for each, dtype in table.schema.items() if each.startswith(key(""))} != types:
                raise ValueError(f"{self}: {name!r} cannot continue the previous workflow, which had other keys")
            if one.squares and table[SQUARES].null_count():
                raise ValueError(f"{self}: {name!r} cannot continue the previous workflow, which had no std or var")

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return `learnt`: {name: file}, the files with the tables that `moments.py` describes."""
        files = {name: f"learnt-{number}-{i}.parquet" for i, name in enumerate(self._aggregates())}
        return {**super().describe(number, state), "learnt": files}

    def files(self, described: Mapping[str, Any], state: State) -> dict[str, pl.DataFrame]:
        return {file: self._learned(state, name) for name, file in described["learnt"].items()}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Step:
        step = super().restore(described, saved)
        assert isinstance(step, StatisticsStep)
        for name, one in step._aggregates().items():
            saved.state.tables[cls.kind, name] = saved.table(described["learnt"][name], columns_of(one.keys))
        return step

    @staticmethod
    def _join(table: pl.DataFrame, on: Sequence[str], defaults: Mapping[str, float]) -> Stage:
        """Join the columns of a table by the keys `on`, null included. Unknown keys get the `defaults`."""
        table = table.rechunk()
        missing = [
            pl.col(name).fill_null(pl.lit(default).cast(table.schema[name])) for name, default in defaults.items()
        ]
        known = table.drop_nulls(key(on[0]))
        direct = DirectTable.of(known[key(on[0])], known.select(list(defaults))) if len(on) == 1 else None
        if direct is not None:
            columns = {name: direct.get(name, pl.col(on[0])) for name in defaults}
            for row in table.filter(pl.col(key(on[0])).is_null()).iter_rows(named=True):  # one, if any
                is_null = pl.col(on[0]).is_null()
                columns = {
                    name: pl.when(is_null).then(pl.lit(row[name])).otherwise(one) for name, one in columns.items()
                }
            types = {name: one.cast(table.schema[name]) for name, one in columns.items()}
            return lambda frame: frame.with_columns(**types).with_columns(missing)
        keys = [f"{key(name)} (nbdist)" for name in on]  # no columns of the user's
        table = table.rename(dict(zip(map(key, on), keys, strict=True)))

        def run(frame: pl.LazyFrame) -> pl.LazyFrame:
            schema = frame.collect_schema()
            alike = keyed_like(table, {one: schema[name] for name, one in zip(on, keys, strict=True)})
            same = [pl.col(name).cast(alike.schema[one]).alias(one) for name, one in zip(on, keys, strict=True)]
            joined = frame.with_columns(same).join(
                alike.lazy(), on=keys, how="left", nulls_equal=True, maintain_order="left"
            )
            return joined.with_columns(missing).drop(keys)

        return run


def _value(rows: pl.DataFrame, aggregate: Aggregate) -> pl.DataFrame:
    """Return the keys, and the values to sum."""
    value = pl.lit(None, pl.Float64) if aggregate.column is None else known(pl.col(key(aggregate.column)))
    keys = [_plain(pl.col(key(name)), rows.schema[key(name)]) for name in aggregate.keys]
    return rows.select(*keys, value.alias(VALUE))


def _plain(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """Return a column with strings in place of categories, whose numbers differ between parts."""
    return column.cast(pl.String) if isinstance(dtype, (pl.Categorical, pl.Enum)) else column

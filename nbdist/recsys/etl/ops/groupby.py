"""Statistics of the training rows with the same key, such as a user or movie, as columns of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from ..kernels import Kernel, lookup
from ..moments import COUNT, LEAST, MOST, ROWS, SQUARES, SUM, Aggregate, key, mean, overall
from .statistics import StatisticsStep
from .step import Stage, State, chained, names_of

_STATISTICS = ("count", "sum", "mean", "std", "var", "min", "max")


class JoinGroupby(StatisticsStep):
    """Add statistics of the training rows with the same key, such as their number or the mean of their prices.

    Null is a key of its own. Nulls and NaN are ignored, except in "count", the number of rows. An unknown key has a
    count and a sum of 0. Its other statistics are computed from all training rows, and so are the statistics of a key
    without values, and "std" and "var" of a single value. Unlike with `TargetEncoding`, a training row's own value is
    included: do not use the target.

    Args:
        *by: The keys: integers, strings, booleans or categoricals. For several columns in a tuple or list, each
            combination of their values is a key.
        columns: Columns of numbers or booleans, for all statistics except "count".
        stats: The statistics: "count" (int64), "sum", "mean", "std", "var", "min", "max" (float64).

    The new columns have names like ``<by>_count`` and ``<by>_<column>_<stat>``, such as "user_genre_price_mean".

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import JoinGroupby, Workflow
        >>> rows = pl.DataFrame({"user": ["ann", "bob", "bob"], "price": [3.0, 1.0, 2.0]})
        >>> workflow = Workflow(JoinGroupby("user", columns="price", stats=["count", "mean"])).fit(rows)
        >>> users = pl.DataFrame({"user": ["bob", "eve"]})
        >>> workflow.transform(users, ["user_count", "user_price_mean"]).collect().rows()
        [(2, 1.5), (0, 2.0)]
    """

    kind = "join_groupby"
    positional, options = "by", ("columns", "stats")

    def __init__(
        self,
        *by: str | Sequence[str],
        columns: str | Sequence[str] = (),
        stats: str | Sequence[str] = ("count",),
    ) -> None:
        self.by = [names_of(group) for group in by]
        self.stats = names_of(stats)
        self._numbers = self.columns = names_of(columns) if columns else []
        if not self.by:
            raise ValueError("JoinGroupby: no keys are named")
        for stat in self.stats:
            if stat not in _STATISTICS:
                raise ValueError(
                    f"JoinGroupby: `stats` must be among {', '.join(map(repr, _STATISTICS))}, got {stat!r}"
                )
        if (self.stats != ["count"]) != bool(self.columns):
            raise ValueError(
                f"JoinGroupby: columns={self.columns} does not fit stats={self.stats}: all statistics except 'count' "
                "need columns"
            )
        self._made: dict[str, tuple[list[str], str | None, str]] = {}
        made: list[tuple[str, str | None, str]]
        for group in self.by:
            name = "_".join(group)
            made = [(f"{name}_count", None, "count")] if "count" in self.stats else []
            stats_of_columns = [stat for stat in self.stats if stat != "count"]
            made += [(f"{name}_{one}_{stat}", one, stat) for one in self.columns for stat in stats_of_columns]
            for new, one, stat in made:
                if new in self._made:
                    raise ValueError(f"JoinGroupby: column {new!r} would be made twice")
                self._made[new] = group, one, stat
        self.adds = list(self._made)
        self.learns = list(self._aggregates())

    def _aggregates(self) -> dict[str, Aggregate]:
        squares = bool({"std", "var"}.intersection(self.stats))
        return {
            self._name(group, one): Aggregate(tuple(group), one, squares)
            for group in self.by
            for one in (self.columns or (None,))
        }

    def reads(self, name: str) -> list[str]:
        return self._made[name][0]

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        self._check_numbers(self.columns, schema, where)
        for group in self.by:
            self._check_keys(group, schema, where)
        self._check_new(schema, where)
        types = {name: pl.Int64() if stat == "count" else pl.Float64() for name, (_, _, stat) in self._made.items()}
        return pl.Schema({**schema, **types})

    def apply(self, names: Sequence[str], state: State, training: bool) -> Stage:
        return chained([self._join(table, group, defaults) for group, table, defaults in self._tables(names, state)])

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        return [
            lookup(group, table.select(map(key, group)), table.select(list(defaults)), defaults)
            for group, table, defaults in self._tables(names, state)
        ]

    def _tables(
        self, wanted: Sequence[str], state: State
    ) -> Iterator[tuple[list[str], pl.DataFrame, dict[str, float]]]:
        """Yield the tables from which the `wanted` columns are looked up: the key columns of each, the table, and the
        values for a key that is not in it."""
        for group in self.by:
            names = [name for name in wanted if self._made[name][0] == group]
            if names:
                yield group, *self._table(group, names, state)

    def _table(self, group: Sequence[str], names: Sequence[str], state: State) -> tuple[pl.DataFrame, dict[str, float]]:
        result: pl.DataFrame | None = None
        defaults: dict[str, float] = {}
        for name in names:
            _, column, stat = self._made[name]
            table = self._learned(state, self._name(group, column or next(iter(self.columns), None)))
            if result is None:
                result = table.select(key(one) for one in group)  # all tables of a group have the same keys, in order
            value, default = self._statistic(table, stat)
            result, defaults[name] = result.with_columns(value.alias(name)), default
        assert result is not None
        return result, defaults

    @staticmethod
    def _statistic(table: pl.DataFrame, stat: str) -> tuple[pl.Series, float]:
        if stat == "count":
            return table[ROWS], 0
        if stat == "sum":
            return table[SUM], 0.0
        count = pl.col(COUNT)
        var = pl.when(count > 1).then(pl.col(SQUARES) / (count - 1))
        columns = {
            "mean": pl.when(count > 0).then(mean()),
            "var": var,
            "std": var.sqrt(),
            "min": pl.col(LEAST),
            "max": pl.col(MOST),
        }
        default = overall(table)[stat]
        return table.select(columns[stat].fill_null(default)).to_series(), default

    @staticmethod
    def _name(group: Sequence[str], column: str | None) -> str:
        return "_".join(group) if column is None else f"{'_'.join(group)}_{column}"

"""Statistics of the training rows with the same user, movie and so on, as columns of each row."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from .fitted import FittedStep, Learnt
from .moments import COUNT, LEAST, MOST, ROWS, SQUARES, SUM, Aggregate, key, overall
from .steps import names_of

STATISTICS = ("count", "sum", "mean", "std", "var", "min", "max")


class JoinGroupby(FittedStep):
    """Add what the training rows with the same key have in common: how many there are, the mean of their prices.

    Null is a key of its own. Nulls and NaN do not count, but for "count", which is of rows. A key that is not known has
    a count and a sum of 0. Any other statistic that a key does not have, because it is not known, has no values, or,
    for "std" and "var", a single one, is that of all training rows. Unlike with `TargetEncoding`, a training row
    counts itself: do not take what is to be predicted.

    Args:
        *by: The keys: integers, strings, booleans or categoricals. Several in a tuple or list are taken together.
        columns: Of numbers or booleans, what all statistics but "count" are of.
        stats: Which: "count" (int64), "sum", "mean", "std", "var", "min", "max" (float64).

    The new columns are called ``<by>_count`` and ``<by>_<column>_<stat>``, such as "user_genre_price_mean".

    Raises:
        TypeError, ValueError: for arguments that make no sense.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import JoinGroupby, Workflow
        >>> rows = pl.DataFrame({"user": ["ann", "bob", "bob"], "price": [3.0, 1.0, 2.0]})
        >>> workflow = Workflow(JoinGroupby("user", columns="price", stats=["count", "mean"])).fit(rows)
        >>> workflow.lazy(pl.DataFrame({"user": ["bob", "eve"]}), ["user_count", "user_price_mean"]).collect().rows()
        [(2, 1.5), (0, 2.0)]
    """

    kind = "join_groupby"

    def __init__(
        self,
        *by: str | Sequence[str],
        columns: str | Sequence[str] = (),
        stats: str | Sequence[str] = ("count",),
    ) -> None:
        self.by = [names_of(group) for group in by]
        self.stats = names_of(stats)
        self.columns = names_of(columns) if columns else []
        if not self.by:
            raise ValueError("JoinGroupby: no keys are named")
        for stat in self.stats:
            if stat not in STATISTICS:
                raise ValueError(f"JoinGroupby: stats: {stat!r} is none of {', '.join(map(repr, STATISTICS))}")
        if (self.stats != ["count"]) != bool(self.columns):
            raise ValueError(
                f"JoinGroupby: columns={self.columns} with stats={self.stats}: 'count' is of rows, all others are of "
                "columns"
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

    def aggregates(self) -> dict[str, Aggregate]:
        squares = bool({"std", "var"}.intersection(self.stats))
        return {
            self._learnt(group, one): Aggregate(tuple(group), one, squares)
            for group in self.by
            for one in (self.columns or (None,))
        }

    def needs(self, wanted: set[str]) -> set[str]:
        return (wanted - set(self.adds)).union(*(self._made[name][0] for name in wanted.intersection(self.adds)))

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        self._check_numbers(self.columns, schema, where)
        for group in self.by:
            self._check_keys(group, schema, where)
        self._check_new(schema, where)
        types = {name: pl.Int64() if stat == "count" else pl.Float64() for name, (_, _, stat) in self._made.items()}
        return pl.Schema({**schema, **types})

    def groups(self, wanted: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        """The keys of each table that is needed for some of the new columns, and these."""
        found = [(group, [name for name in wanted if self._made[name][0] == group]) for group in self.by]
        return [(group, names) for group, names in found if names]

    def joined(self, learnt: Learnt, group: Sequence[str], names: Sequence[str]) -> tuple[pl.DataFrame, list[float]]:
        """What each key has: the keys and `names`; and what those of a key that is not known are."""
        result: pl.DataFrame | None = None
        defaults: list[float] = []
        for name in names:
            _, column, stat = self._made[name]
            table = self.table(learnt, self._learnt(group, column or next(iter(self.columns), None)))
            if result is None:
                result = table.select(key(one) for one in group)  # all tables of a group have the same keys, in order
            value, default = self._statistic(table, stat)
            result = result.with_columns(value.alias(name))
            defaults.append(default)
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
            "mean": pl.when(count > 0).then(pl.col(SUM) / count),
            "var": var,
            "std": var.sqrt(),
            "min": pl.col(LEAST),
            "max": pl.col(MOST),
        }
        default = overall(table)[stat]
        return table.select(columns[stat].fill_null(default)).to_series(), default

    @staticmethod
    def _learnt(group: Sequence[str], column: str | None) -> str:
        return "_".join(group) if column is None else f"{'_'.join(group)}_{column}"

    def __repr__(self) -> str:
        groups = [group[0] if len(group) == 1 else tuple(group) for group in self.by]
        return f"JoinGroupby({', '.join(map(repr, groups))}, columns={self.columns}, stats={self.stats})"

"""The mean of the target for each category, computed from other rows than the row itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from ... import ranks
from ..fingerprint import Fingerprint
from ..hashing import combined
from ..kernels import Kernel, lookup
from ..moments import COUNT, ROWS, SUM, Aggregate, columns_of, key, merged, overall
from .statistics import StatisticsStep
from .step import ROW, Query, Saved, Stage, State, Step, TrainingRows, chained, names_of

_FOLD = "fold (nbdist)"
"""The fold of each training row."""
_LEFT, _SUM_LEFT, _PRIOR = "left (nbdist)", "sum left (nbdist)", "prior (nbdist)"


class TargetEncoding(StatisticsStep):
    """Add, for each category, the mean of a target over the training rows with that category; float32.

    The mean is shrunk towards the mean of all rows, as if the category had `smoothing` further rows with that mean:
    ``(sum + smoothing * mean of all) / (rows + smoothing)``. An unknown category has the mean of all rows. Null is a
    category of its own. Rows with a null or NaN target are ignored.

    A training row must not see its own target. So training rows are divided at random into `folds`, and
    ``Workflow.write(..., training=True)`` gives each row the mean of the rows in the other folds. ``training=False``,
    `Workflow.transform` and servers give the mean of all training rows. The fold of a row depends on its number in the
    input, so `write` needs the same rows as `fit`, with the target, in the same order; it compares their fingerprints.

    Args:
        *columns: The categories: integers, strings, booleans or categoricals. For several columns in a tuple or list,
            each combination of their values is a category.
        target: The column whose mean is computed: numbers or booleans. Requests need not contain it.
        folds: The number of folds, at least 2.
        smoothing: The number of rows to which the mean of all rows is equivalent, at least 0.
        seed: The seed of the folds.

    The new columns have names like ``TE_<columns>_<target>``, such as "TE_user_genre_label".

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import TargetEncoding, Workflow
        >>> rows = pl.DataFrame({"movie": [1, 1, 1, 2], "label": [True, True, False, False]})
        >>> workflow = Workflow(TargetEncoding("movie", target="label", smoothing=1)).fit(rows)
        >>> workflow.transform(pl.DataFrame({"movie": [1, 2, 3]}), ["TE_movie_label"]).collect().to_series().to_list()
        [0.625, 0.25, 0.5]
    """

    kind = "target_encoding"
    options = ("target", "folds", "smoothing", "seed")
    numbers_rows = True
    _folds = f"{kind}_folds"

    def __init__(
        self, *columns: str | Sequence[str], target: str, folds: int = 5, smoothing: float = 20, seed: int = 0
    ) -> None:
        groups = [names_of(group) for group in columns]
        if not groups:
            raise ValueError("TargetEncoding: no columns are named: give at least one")
        if folds < 2:
            raise ValueError(f"TargetEncoding: `folds` must be at least 2, got {folds}")
        if not 0 <= smoothing < math.inf:
            raise ValueError(f"TargetEncoding: `smoothing` must be a number of rows, at least 0, got {smoothing}")
        (self.target,) = names_of(target)
        if any(self.target in group for group in groups):
            raise ValueError(f"TargetEncoding: column {self.target!r} is the target, and cannot be a category too")
        self.folds, self.smoothing, self.seed = folds, smoothing, seed
        self.groups = {f"TE_{'_'.join(group)}_{self.target}": group for group in groups}
        """A mapping from each new column to the columns that it encodes."""
        self.adds = self.learns = names_of([f"TE_{'_'.join(group)}_{self.target}" for group in groups])
        self._numbers = self.recognizes = [self.target]
        self.columns = groups

    def _aggregates(self) -> dict[str, Aggregate]:
        return {name: Aggregate(tuple(group), self.target) for name, group in self.groups.items()}

    def reads(self, name: str) -> list[str]:
        return self.groups[name]

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        self._check_numbers([self.target], schema, where)
        for group in self.groups.values():
            self._check_keys(group, schema, where)
        self._check_new(schema, where)
        return pl.Schema({**schema, **dict.fromkeys(self.adds, pl.Float32())})

    def learn(self, rows: TrainingRows, state: State, previous: State) -> None:
        by_fold = {name: replace(one, keys=(*one.keys, _FOLD)) for name, one in self._aggregates().items()}
        prints = {name: Fingerprint([*group, self.target]) for name, group in self.groups.items()}

        def also(frame: pl.DataFrame) -> None:
            for one in prints.values():
                one.add(frame)

        number = pl.col(ROW).alias(key(ROW))
        found = self._added_up(rows, by_fold, self._fold().alias(key(_FOLD)), number, also=also)
        state.fingerprints.update({name: one.everywhere() for name, one in prints.items()})
        for name, table in found.items():
            state.tables[self._folds, name] = table
            every = merged([table.drop(key(_FOLD))], self.groups[name])
            self._keep(name, every, state, previous, rows.where)

    def check_training(self, names: Collection[str], rows: TrainingRows, state: State) -> None:
        prints = {name: Fingerprint([*self.groups[name], self.target]) for name in names}
        columns = sorted({column for one in prints.values() for column in one.columns})
        named = [*(pl.col(name).alias(key(name)) for name in columns), pl.col(ROW).alias(key(ROW))]
        count = 0
        for (frame,) in rows.read("compare with fit", [Query([*columns, ROW], lambda frame: frame.select(named))]):
            count += len(frame)
            for one in prints.values():
                one.add(frame)
        count = sum(ranks.all_gather(count))
        for name, one in prints.items():
            fitted = int(state.tables[self._folds, name][ROWS].sum())
            found, known = one.everywhere(), state.fingerprints.get(name)
            if fitted != count:
                why = f"{count} rows with training=True, but {name!r} was fitted to {fitted}"
            elif known is None:
                why = f"{name!r} was fitted by an nbdist that did not keep the order of the rows: fit again"
            elif known != found:
                why = (
                    f"the rows with training=True are not those, or not in the order, that {name!r} was fitted to: a "
                    "row would see its own target"
                )
            else:
                continue
            raise ValueError(f"{rows.where}: {why}; give the rows of fit, or training=False")

    def apply(self, names: Sequence[str], state: State, training: bool) -> Stage:
        return chained([self._encoding(name, state, training) for name in names])

    def _encoding(self, name: str, state: State, training: bool) -> Stage:
        group, defaults = self.groups[name], {name: self._default(state, name)}
        if not training:
            return self._join(self._encoded(state, name), group, defaults)
        by_fold = self._join(self._encoded_by_fold(state, name), [*group, _FOLD], defaults)
        return lambda frame: by_fold(frame.with_columns(self._fold())).drop(_FOLD)

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        kernels = []
        for name in names:
            table, group = self._encoded(state, name), self.groups[name]
            defaults = {name: self._default(state, name)}
            kernels.append(lookup(group, table.select(map(key, group)), table.select(name), defaults))
        return kernels

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return `columns`: {new column: the columns that it encodes}; `target`, `folds`, `smoothing`, `seed`;
        `learnt`: {name: file}; `learnt_by_fold`: {name: file} with the rows of the latest `fit` alone, fold by fold;
        and `fingerprints`: {name: text} of these rows in their order, from `fingerprint.py`."""
        prints = {name: state.fingerprints[name] for name in self.groups if name in state.fingerprints}
        by_fold = {name: f"learnt-{number}-{i}-folds.parquet" for i, name in enumerate(self.groups)}
        more = {"columns": self.groups, "learnt_by_fold": by_fold, "fingerprints": prints}
        return {**super().describe(number, state), **more}

    def files(self, described: Mapping[str, Any], state: State) -> dict[str, pl.DataFrame]:
        by_fold = {file: state.tables[self._folds, name] for name, file in described["learnt_by_fold"].items()}
        return {**super().files(described, state), **by_fold}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Step:
        step = super().restore({**described, "columns": described["columns"].values()}, saved)
        assert isinstance(step, TargetEncoding)
        for name, group in step.groups.items():
            columns = {**columns_of(group), key(_FOLD): pl.Int64()}
            saved.state.tables[cls._folds, name] = saved.table(described["learnt_by_fold"][name], columns)
        prints = described.get("fingerprints", {})
        saved.state.fingerprints.update({name: prints[name] for name in step.groups if name in prints})
        return step

    def _fold(self) -> pl.Expr:
        """Return the fold of each row, by its number `ROW`; int64."""
        number = pl.col(ROW).cast(pl.UInt64)
        return (combined(pl.lit(self.seed % 2**64, pl.UInt64), number) % self.folds).cast(pl.Int64).alias(_FOLD)

    def _default(self, state: State, name: str) -> float:
        """Return the value for categories that did not occur in training."""
        return overall(self._learned(state, name))["mean"]

    def _encoded(self, state: State, name: str) -> pl.DataFrame:
        """Return a row for each category: its keys, and in the column `name` the value that new rows get."""
        table = self._learned(state, name).rename({COUNT: _LEFT, SUM: _SUM_LEFT})
        return self._smoothed(table.with_columns(pl.lit(self._default(state, name)).alias(_PRIOR)), name, [])

    def _encoded_by_fold(self, state: State, name: str) -> pl.DataFrame:
        """Return a row for each category and fold: the keys, the fold, and in the column `name` the value that training
        rows of this fold get.
        """
        keys = [key(one) for one in self.groups[name]]
        every, folds = self._learned(state, name), state.tables[self._folds, name]
        fold = key(_FOLD)
        count, total = int(every[COUNT].sum()), math.fsum(every[SUM].to_list())
        priors = []
        for number in range(self.folds):
            inside = folds.filter(pl.col(fold) == number)
            rows = count - int(inside[COUNT].sum())
            mean = (total - math.fsum(inside[SUM].to_list())) / rows if rows else self._default(state, name)
            priors.append((number, mean))
        by_fold = pl.DataFrame(priors, schema={fold: pl.Int64, _PRIOR: pl.Float64}, orient="row")
        table = (
            every.select(*keys, COUNT, SUM)
            .join(by_fold, how="cross")
            .join(folds.select(*keys, fold, COUNT, SUM), on=[*keys, fold], how="left", nulls_equal=True)
            .with_columns(
                (pl.col(COUNT) - pl.col(f"{COUNT}_right").fill_null(0)).alias(_LEFT),
                (pl.col(SUM) - pl.col(f"{SUM}_right").fill_null(0.0)).alias(_SUM_LEFT),
            )
        )
        return self._smoothed(table, name, [fold])

    def _smoothed(self, table: pl.DataFrame, name: str, more: Sequence[str]) -> pl.DataFrame:
        rows = pl.col(_LEFT) + self.smoothing
        total = pl.when(pl.col(_LEFT) > 0).then(pl.col(_SUM_LEFT)).otherwise(0.0)  # rounding may have left something
        mean = pl.when(rows > 0).then((total + self.smoothing * pl.col(_PRIOR)) / rows).otherwise(pl.col(_PRIOR))
        return table.select(*[key(one) for one in self.groups[name]], *more, mean.cast(pl.Float32).alias(name))

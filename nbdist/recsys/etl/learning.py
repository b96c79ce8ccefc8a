"""What is learnt from rows by all ranks: vocabularies, by how often each value occurs; sums, means and extremes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from .. import ranks
from .fitted import FOLD, ROW, FittedStep, Learnt
from .inputs import Input
from .moments import ROWS, SQUARES, SUM, VALUE, Aggregate, Sums, key, known, merged, squared_distances
from .pipeline import Pipeline, origin, pipeline, uses_row_numbers
from .rows import DifferenceLag, Filter, RowStep
from .steps import Categorify, Join, Step
from .target_encoding import TargetEncoding
from .vocabulary import Vocabulary

_COUNT = "count (nbdist)"  # no column of the user's


def learn(
    steps: Sequence[Step],
    schemas: Sequence[pl.Schema],
    given: Input,
    size: int,
    engine: Any,
    progress: bool,
    previous: Learnt,
) -> tuple[Learnt, int]:
    """What the steps learn, the same on all ranks; and the number of rows that no `Filter` has left out.

    Args:
        schemas: The columns before each of the steps.
        given: The rows; they are read once for each step that learns.
        size: Rows to read at a time.
        engine: Polars' engine for what is on disk.
        progress: Whether rank 0 shows bars.
        previous: What is known before.
    """
    learnt = Learnt()
    done = 0  # steps that are in `given`
    for i, step in enumerate(steps):
        if isinstance(step, RowStep):
            given = with_rows(given, steps[done:i], step, learnt, schemas[i].names(), True, size, engine, progress)
            done = i + 1
        elif isinstance(step, Categorify):
            _count_values(steps[done : i + 1], learnt, schemas[i], given, size, engine, progress, previous.vocabularies)
        elif isinstance(step, FittedStep):
            _add_up(steps[done:i], step, learnt, given, size, engine, progress, previous.tables)
    return learnt, given.rows


def with_rows(
    given: Input,
    steps: Sequence[Step],
    step: RowStep,
    learnt: Learnt,
    columns: Sequence[str],
    training: bool,
    size: int,
    engine: Any,
    progress: bool,
) -> Input:
    """The rows as they are after `steps`, of which none is a `RowStep`, and then `step`; all ranks have to call it.

    Args:
        columns: Those that there are to be before `step`.
        training: Whether the rows are those that the steps are fitted to.
        size: Rows to read at a time.
        engine: Polars' engine for what is on disk.
        progress: Whether rank 0 shows bars.
    """
    if steps:
        if training and uses_row_numbers(steps, columns):
            given = numbered(given, steps, learnt)
        given = given.derived(pipeline(steps, learnt, columns, training))
    if isinstance(step, Filter):
        return given.filtered(step.condition, size, engine, progress)
    assert isinstance(step, DifferenceLag)
    made = [name for name in step.adds if step.needs({name}) <= given.schema.keys()]
    return given.beside(step.expressions(given.schema, made), step.shifts)


def numbered(given: Input, steps: Sequence[Step], learnt: Learnt) -> Input:
    """The rows that some steps were fitted to, with the column `ROW`.

    Raises:
        ValueError: There are not as many as then.
    """
    for step in (step for step in steps if isinstance(step, TargetEncoding)):
        for name in step.groups:
            rows = int(step.folds_table(learnt, name)[ROWS].sum())
            if rows != given.rows:
                raise ValueError(
                    f"{given.where}: {given.rows} rows with training=True, but {name!r} was fitted to {rows}: give the "
                    "same rows, or say training=False"
                )
    return given.numbered(ROW)


def _count_values(
    steps: Sequence[Step],
    learnt: Learnt,
    schema: pl.Schema,
    given: Input,
    size: int,
    engine: Any,
    progress: bool,
    previous: Mapping[str, Vocabulary],
) -> None:
    """Learn the vocabularies of the last of the steps, a `Categorify`; `schema` is that before it."""
    step = steps[-1]
    assert isinstance(step, Categorify)
    queries = _counting(steps, len(steps) - 1, learnt, schema)
    if uses_row_numbers(steps[:-1], step.adds):
        given = given.numbered(ROW)
    counts = {name: one for group in step.groups for one in [_Counts()] for name in group}
    parts = given.share(size)
    with ranks.progress_bar(f"count {', '.join(step.adds)}", sum(part.rows for part in parts), progress) as bar:
        for part in parts:
            found = part.collect(queries(part.scan()), engine)
            for name, frame in zip(step.adds, found, strict=True):
                counts[name].add(frame)
            bar.update(part.rows)
    for group in step.groups:
        first, counted = group[0], counts[group[0]].everywhere()
        limits = step.min_count[first], step.max_size[first], step.num_buckets[first]
        vocabulary = Vocabulary.of(counted, False, *limits, previous.get(first))
        for name in group:
            learnt.vocabularies[name] = replace(vocabulary, lists=isinstance(schema[name], pl.List))


def _add_up(
    steps: Sequence[Step],
    step: FittedStep,
    learnt: Learnt,
    given: Input,
    size: int,
    engine: Any,
    progress: bool,
    previous: Mapping[tuple[str, str], pl.DataFrame],
) -> None:
    """Learn the tables of a step that comes after `steps`."""
    aggregates = step.aggregates()
    columns = sorted({*step.columns, *(name for one in aggregates.values() for name in one.keys)} - {FOLD})
    more: list[pl.Expr] = []
    wanted = columns
    if isinstance(step, TargetEncoding):
        more, wanted = [step.fold().alias(key(FOLD))], [*columns, ROW]
    if more or uses_row_numbers(steps, columns):
        given = given.numbered(ROW)
    run = pipeline(steps, learnt, wanted, True)
    names = [pl.col(name).alias(key(name)) for name in columns]

    def add_up(aggregates: Mapping[str, Aggregate], means: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
        """What was seen of the values; or, where there are means, of the squares of their distances from these."""
        sums = {name: Sums(one.keys) for name, one in aggregates.items()}
        with ranks.progress_bar(f"add up {', '.join(columns)}", sum(part.rows for part in parts), progress) as bar:
            for part in parts:
                (rows,) = part.collect([run(part.scan()).select(*names, *more)], engine)
                for name, one in aggregates.items():
                    values = _value(rows, one)
                    sums[name].add(squared_distances(values, means[name], one.keys) if means else values)
                bar.update(part.rows)
        return {name: one.everywhere() for name, one in sums.items()}

    parts = given.share(size)
    tables = add_up(aggregates, {})
    squared = {name: one for name, one in aggregates.items() if one.squares}
    squares = add_up(squared, tables) if squared else {}
    for name, one in aggregates.items():
        # The tables of the same rows have the same keys, in the same order.
        column = squares[name][SUM].alias(SQUARES) if name in squares else pl.lit(None, pl.Float64).alias(SQUARES)
        table = tables[name].with_columns(column)
        keys = [each for each in one.keys if each != FOLD]
        if more:
            learnt.tables[f"{step.kind}_folds", name] = table
            table = merged([table.drop(key(FOLD))], keys)
        before = previous.get((step.kind, name))
        learnt.tables[step.kind, name] = table if before is None else merged([before, table], keys)
        step.require_value(name, learnt.tables[step.kind, name], given.where)


def _value(rows: pl.DataFrame, aggregate: Aggregate) -> pl.DataFrame:
    """The keys, and the values that are added up."""
    value = pl.lit(None, pl.Float64) if aggregate.column is None else known(pl.col(key(aggregate.column)))
    keys = [_plain(pl.col(key(name)), rows.schema[key(name)]) for name in aggregate.keys]
    return rows.select(*keys, value.alias(VALUE))


def _plain(column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    """A column with strings for categories, which are numbered otherwise in each part."""
    return column.cast(pl.String) if isinstance(dtype, (pl.Categorical, pl.Enum)) else column


def _counting(
    steps: Sequence[Step], index: int, learnt: Learnt, schema: pl.Schema
) -> Callable[[pl.LazyFrame], list[pl.LazyFrame]]:
    """How often each value of the columns of step `index`, a `Categorify`, occurs: `value`, null too, and `count`.

    Args:
        learnt: By the steps before it.
        schema: The columns before it.

    A joined column is not joined for that: keys are counted, and the counts added up over the rows of its table.
    """
    queries: list[Pipeline] = []
    for name in steps[index].adds:
        join = origin(steps, index, name)
        if join is None:
            before = pipeline(steps[:index], learnt, [name], True)
            queries.append(_then(before, _count(name, None, schema[name])))
        else:
            before = pipeline(steps[: steps.index(join)], learnt, join.on, True)
            queries.append(_then(before, _count(name, join, schema[name])))
    return lambda frame: [query(frame) for query in queries]


def _count(name: str, join: Join | None, dtype: pl.DataType) -> Pipeline:
    keys = [name] if join is None else join.on
    inner = dtype.inner if isinstance(dtype, pl.List) else dtype
    plain = pl.String if isinstance(inner, (pl.Categorical, pl.Enum)) else inner

    def count(frame: pl.LazyFrame) -> pl.LazyFrame:
        if join is None and isinstance(dtype, pl.List):
            frame = _explode(frame, name)
        counted = frame.group_by(keys).agg(pl.len().cast(pl.Int64).alias(_COUNT))
        if join is not None:
            counted = counted.join(join.table.lazy(), on=keys, how="left")
            if isinstance(dtype, pl.List):
                counted = _explode(counted, name)
        values = counted.select(pl.col(name).cast(plain).alias("value"), pl.col(_COUNT).alias("count"))
        return values.group_by("value").agg(pl.col("count").sum())

    return count


def _explode(frame: pl.LazyFrame, name: str) -> pl.LazyFrame:
    """A row for each element of the lists, and one with null for a list that is null; none for an empty one."""
    return frame.filter(pl.col(name).list.len().ne_missing(0)).explode(name)


def _then(first: Pipeline, second: Pipeline) -> Pipeline:
    return lambda frame: second(first(frame))


class _Counts:
    """How often each value was seen: in some rows, then in others, in the end by all ranks."""

    def __init__(self) -> None:
        self._frames: list[pl.DataFrame] = []
        self._room = 1 << 20

    def add(self, frame: pl.DataFrame) -> None:
        """Add counts: `value`, each once, and `count`."""
        self._frames.append(frame)
        if sum(one.height for one in self._frames) > self._room:
            self._frames = [_merge(self._frames)]
            self._room = max(self._room, 2 * self._frames[0].height)

    def everywhere(self) -> pl.DataFrame:
        """The counts of all ranks together, on each of them; in no particular order."""
        mine = _merge(self._frames).write_ipc(None).getvalue() if self._frames else None  # a rank may have no rows
        return _merge([pl.read_ipc(data) for data in ranks.all_gather(mine) if data is not None])


def _merge(counted: Sequence[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(counted).group_by("value").agg(pl.col("count").sum())

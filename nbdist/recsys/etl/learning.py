"""Vocabularies learnt from rows: how often each value occurs, counted by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from .. import ranks
from .inputs import Input
from .pipeline import Pipeline, origin, pipeline
from .steps import Categorify, Join, Step
from .vocabulary import Vocabulary

_COUNT = "count (nbdist)"  # no column of the user's


def learn(
    steps: Sequence[Step],
    schemas: Sequence[pl.Schema],
    given: Input,
    size: int,
    engine: Any,
    progress: bool,
    previous: Mapping[str, Vocabulary],
) -> dict[str, Vocabulary]:
    """The vocabulary of each column that is categorified, the same on all ranks.

    Args:
        schemas: The columns before each of the steps.
        given: The rows; they are read once for each `Categorify`.
        size: Rows to read at a time.
        engine: Polars' engine for what is on disk.
        progress: Whether rank 0 shows bars.
        previous: What is known before, column → vocabulary.
    """
    vocabularies: dict[str, Vocabulary] = {}
    parts = given.share(size)
    for i, step in enumerate(steps):
        if not isinstance(step, Categorify):
            continue
        queries = _counting(steps, i, vocabularies, schemas[i])
        counts = {name: one for group in step.groups for one in [_Counts()] for name in group}
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
                vocabularies[name] = replace(vocabulary, lists=isinstance(schemas[i][name], pl.List))
    return vocabularies


def _counting(
    steps: Sequence[Step], index: int, vocabularies: Mapping[str, Vocabulary], schema: pl.Schema
) -> Callable[[pl.LazyFrame], list[pl.LazyFrame]]:
    """How often each value of the columns of step `index`, a `Categorify`, occurs: `value`, null too, and `count`.

    Args:
        vocabularies: Of the steps before it.
        schema: The columns before it.

    A joined column is not joined for that: keys are counted, and the counts added up over the rows of its table.
    """
    queries: list[Pipeline] = []
    for name in steps[index].adds:
        join = origin(steps, index, name)
        if join is None:
            before = pipeline(steps[:index], vocabularies, [name])
            queries.append(_then(before, _count(name, None, schema[name])))
        else:
            before = pipeline(steps[: steps.index(join)], vocabularies, join.on)
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

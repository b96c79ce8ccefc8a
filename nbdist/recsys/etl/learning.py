"""Fitting of steps, one after the other, to the rows of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from .. import ranks
from .inputs import Input, Reading
from .ops.rows import RowStep
from .ops.step import ROW, Query, State, Step, TrainingRows, chained
from .pipeline import needed, pipeline, uses_row_numbers


def learn(
    steps: Sequence[Step], schemas: Sequence[pl.Schema], given: Input, reading: Reading, previous: State
) -> tuple[State, int]:
    """Fit the steps, with the same result on all ranks, and count the rows that no `Filter` has removed.

    Args:
        schemas: The columns before each of the steps.
        given: The rows. They are read once for each step that learns.
        previous: The earlier state.
    """
    state = State()
    done = 0  # steps that are in `given`
    for i, step in enumerate(steps):
        if isinstance(step, RowStep):
            given = with_rows(given, steps[done:i], step, state, schemas[i].names(), True, reading, fitting=True)
            done = i + 1
        else:
            step.learn(_Rows(steps[done:i], schemas[i], given.where, given, state, reading), state, previous)
    return state, given.rows


@dataclass(frozen=True)
class _Rows(TrainingRows):
    """The rows of an input after further steps, which are applied when the rows are read."""

    given: Input
    state: State
    """The learned state of the steps."""
    reading: Reading

    def read(self, what: str, queries: Sequence[Query]) -> Iterator[list[pl.DataFrame]]:
        given, runs = self.given, []
        for columns, then, before in queries:
            steps = self.steps if before is None else self.steps[: self.steps.index(before)]
            if given is self.given and (ROW in columns or uses_row_numbers(steps, columns)):
                given = given.numbered(ROW)
            runs.append(chained([pipeline(steps, self.state, columns, True), then]))
        parts = given.share(self.reading.size)
        with ranks.progress_bar(what, sum(part.rows for part in parts), self.reading.progress) as bar:
            for part in parts:
                yield part.collect([run(part.scan()) for run in runs], self.reading.engine)
                bar.update(part.rows)


def with_rows(
    given: Input,
    steps: Sequence[Step],
    step: RowStep,
    state: State,
    columns: Sequence[str],
    training: bool,
    reading: Reading,
    fitting: bool = False,
) -> Input:
    """Return the rows after `steps` and `step`. None of `steps` is a `RowStep`. All ranks must call it.

    Args:
        columns: The columns that must exist before `step`.
        training: Whether these are the rows that the steps were fitted to.
        fitting: Whether the steps are being fitted now, so that the rows need not be compared.
    """
    if steps:
        if training and uses_row_numbers(steps, columns):
            given = given.numbered(ROW) if fitting else numbered(given, steps, state, columns, reading)
        given = given.derived(pipeline(steps, state, columns, training))
    return step.over(given, reading)


def numbered(given: Input, steps: Sequence[Step], state: State, columns: Sequence[str], reading: Reading) -> Input:
    """Return the rows that some steps were fitted to, with the column `ROW`. All ranks must call it.

    Args:
        columns: The columns that must exist after the steps.

    Raises:
        ValueError: The rows differ from the rows of `fit`, or have a different order.
    """
    after = needed(steps, columns)[1:]
    for i, step in enumerate(steps):
        names = [name for name in step.adds if name in after[i]]
        if step.numbers_rows and names:
            step.check_training(names, _Rows(steps[:i], given.schema, given.where, given, state, reading), state)
    return given.numbered(ROW)

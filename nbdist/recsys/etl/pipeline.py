"""The steps of a workflow as one lazy query that does the least work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl

from .ops.categorify import Categorify
from .ops.join import Join, origin
from .ops.step import ROW, Stage, State, Step, chained


def needed(steps: Sequence[Step], wanted: Iterable[str], training: bool = False) -> list[set[str]]:
    """Return the columns that must exist before each step, and after the last one, to get the `wanted` columns.

    Args:
        training: Whether the rows must be compared with the rows that the steps were fitted to.
    """
    columns = [set(wanted)]
    for step in reversed(steps):
        more = step.recognizes if training and not columns[-1].isdisjoint(step.adds) else ()
        columns.append(step.needs(columns[-1]).union(more))
    return columns[::-1]


def pipeline(steps: Sequence[Step], state: State, wanted: Sequence[str], training: bool = False) -> Stage:
    """Return the steps as one function from lazy frame to lazy frame, with the `wanted` columns.

    The order and the number of the rows do not change: a `Filter` does nothing here. Columns that no wanted column
    depends on may be missing. For the rows of `fit` (`training`), the frame must also have the column `ROW`, if
    `uses_row_numbers`.

    Steps are independent, with one exception. If a later step categorifies a joined column, and no step in between
    changes it, the codes are computed once for each row of the joined table, and joined instead: a table of movies has
        far fewer rows than their ratings.
    """
    steps = [step for step in steps if not step.selects]
    columns = needed(steps, wanted)
    rows = {ROW} if training and uses_row_numbers(steps, wanted) else set()
    stages: list[Stage] = []
    for i, step in enumerate(steps):
        made = sorted(columns[i + 1].intersection(step.adds))
        if isinstance(step, Join) and made:
            stages.append(step.apply(made, state, training, _coded_later(steps, i, columns)))
        elif isinstance(step, Categorify) and made:
            coded = {name for name in made if origin(steps[:i], name)}
            stages.append(step.apply(made, state, training, coded))
        elif made or not step.adds:
            stages.append(step.apply(made, state, training))
    apply = chained(stages)
    # Nothing else, or it could be in the way of a joined column; but one for the number of rows.
    read = sorted(columns[0] | rows)
    return lambda frame: apply(frame.select(read or pl.first())).select(wanted)


def _coded_later(steps: Sequence[Step], index: int, columns: Sequence[set[str]]) -> list[str]:
    """Return the columns that the join with the number `index` adds, that no step changes, and that a later step
    then replaces by codes. `columns` are the `needed` columns.
    """
    return [
        name
        for i, later in enumerate(steps)
        if isinstance(later, Categorify)
        for name in later.adds
        if origin(steps[:i], name) is steps[index] and name in columns[i + 1]
    ]


def uses_row_numbers(steps: Sequence[Step], wanted: Iterable[str]) -> bool:
    """Return whether a wanted column depends on the numbers of the rows that the steps were fitted to."""
    after = needed(steps, wanted)[1:]
    pairs = zip(steps, after, strict=True)
    return any(step.numbers_rows and not columns.isdisjoint(step.adds) for step, columns in pairs)

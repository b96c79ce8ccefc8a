"""What the steps of a workflow do to lazy frames, with the least work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import polars as pl

from .crossing import HashedCross
from .direct_table import DirectTable
from .elementwise import ColumnStep
from .fitted import FOLD, ROW, Learnt
from .groupby import JoinGroupby
from .moments import key
from .normalizing import Normalize, NormalizeMinMax
from .rows import DifferenceLag, Filter
from .steps import Categorify, Compute, Drop, Join, Step
from .target_encoding import TargetEncoding
from .vocabulary import Vocabulary

Pipeline = Callable[[pl.LazyFrame], pl.LazyFrame]


def needed(steps: Sequence[Step], wanted: Iterable[str]) -> list[set[str]]:
    """The columns that have to be there before each step, and after the last, for `wanted` to be there in the end."""
    columns = [set(wanted)]
    for step in reversed(steps):
        columns.append(step.needs(columns[-1]))
    return columns[::-1]


def pipeline(steps: Sequence[Step], learnt: Learnt, wanted: Sequence[str], training: bool = False) -> Pipeline:
    """The steps as one function from lazy frame to lazy frame, which gives the `wanted` columns.

    The order of the rows is kept, and so are all of them: a `Filter` does nothing here. Columns that nothing wanted is
    made of need not be there. Where rows are those that the steps are fitted to (`training`), the frame has the column
    `ROW` too, if `uses_row_numbers`.

    A joined column that is categorified later, and not changed before that, is coded once for each row of the joined
    table, and the codes are joined: there are more ratings than movies.
    """
    steps = [step for step in steps if not isinstance(step, Filter)]
    columns = needed(steps, wanted)
    rows = {ROW} if training and uses_row_numbers(steps, wanted) else set()
    vocabularies = learnt.vocabularies
    stages: list[Pipeline] = []
    for i, step in enumerate(steps):
        after = columns[i + 1]
        made = after.intersection(step.adds)
        if isinstance(step, Join) and made:
            coded = [
                name
                for k, later in enumerate(steps[i:], i)
                if isinstance(later, Categorify)
                for name in later.adds
                if origin(steps, k, name) is step and name in columns[k + 1]
            ]
            table = step.table.lazy()
            for name in coded:
                table = vocabularies[name].encode(table, name, _codes(name))
            stages.append(_join(table.select(*step.on, *sorted(made), *map(_codes, coded)).collect(), step.on))
        elif isinstance(step, Categorify) and made:
            for name in sorted(made):
                stages.append(_categorify(vocabularies[name], name, coded=origin(steps, i, name) is not None))
        elif isinstance(step, Compute) and made:
            stages.append(_with_columns([step.columns[name].alias(name) for name in sorted(made)]))
        elif isinstance(step, ColumnStep) and made:
            stages.append(_replace(step, sorted(made)))
        elif isinstance(step, HashedCross) and made:
            stages.append(_cross(step))
        elif isinstance(step, (Normalize, NormalizeMinMax)) and made:
            stages.append(_with_columns([step.expression(learnt, name) for name in sorted(made)]))
        elif isinstance(step, TargetEncoding) and made:
            stages += [_encode(step, learnt, name, training) for name in sorted(made)]
        elif isinstance(step, JoinGroupby) and made:
            for group, names in step.groups(sorted(made)):
                joined, defaults = step.joined(learnt, group, names)
                stages.append(_lookup(joined, group, dict(zip(names, defaults, strict=True))))
        elif isinstance(step, DifferenceLag) and made:
            stages.append(_difference(step, sorted(made)))
        elif isinstance(step, Drop):
            stages.append(_drop(step.columns))

    def run(frame: pl.LazyFrame) -> pl.LazyFrame:
        # Nothing else, or it could be in the way of a joined column; but one for the number of rows.
        frame = frame.select(sorted(columns[0] | rows) or pl.first())
        for stage in stages:
            frame = stage(frame)
        return frame.select(wanted)

    return run


def uses_row_numbers(steps: Sequence[Step], wanted: Iterable[str]) -> bool:
    """Whether something wanted is made, for the rows that the steps are fitted to, by the number of a row."""
    after = needed(steps, wanted)[1:]
    pairs = zip(steps, after, strict=True)
    return any(isinstance(step, TargetEncoding) and not columns.isdisjoint(step.adds) for step, columns in pairs)


def origin(steps: Sequence[Step], index: int, column: str) -> Join | None:
    """The join that a column comes from, as it is before step `index`. None: from the input, or computed."""
    for step in reversed(steps[:index]):
        if column in step.adds:
            return step if isinstance(step, Join) else None
    return None


def _codes(name: str) -> str:
    """The column for the codes of a column, until it is replaced by them."""
    return f"{name} (codes, nbdist)"


def _join(table: pl.DataFrame, on: Sequence[str]) -> Pipeline:
    added = [name for name in table.columns if name not in on]
    lookup = DirectTable.of(table[on[0]], table.select(added)) if len(on) == 1 else None
    if lookup is not None:
        columns = {name: lookup.get(name, pl.col(on[0])) for name in added}
        return lambda frame: frame.with_columns(**columns)
    table = table.rechunk()
    return lambda frame: frame.join(table.lazy(), on=on, how="left", maintain_order="left")


def _categorify(vocabulary: Vocabulary, name: str, coded: bool) -> Pipeline:
    def run(frame: pl.LazyFrame) -> pl.LazyFrame:
        names = frame.collect_schema().names()
        if not coded:
            frame = vocabulary.encode(frame, name, _codes(name))
        codes = vocabulary.filled(pl.col(_codes(name)))
        return frame.select(codes.alias(name) if one == name else one for one in names if one != _codes(name))

    return run


def _with_columns(columns: Sequence[pl.Expr]) -> Pipeline:
    return lambda frame: frame.with_columns(columns)


def _encode(step: TargetEncoding, learnt: Learnt, name: str, training: bool) -> Pipeline:
    group, defaults = step.groups[name], {name: step.default(learnt, name)}
    if not training:
        return _lookup(step.encoded(learnt, name), group, defaults)
    lookup = _lookup(step.encoded_by_fold(learnt, name), [*group, FOLD], defaults)
    return lambda frame: lookup(frame.with_columns(step.fold())).drop(FOLD)


def _lookup(table: pl.DataFrame, on: Sequence[str], defaults: Mapping[str, float]) -> Pipeline:
    """Add columns of a table with the keys `on`, null being one; `defaults` for keys that are not there."""
    table = table.rechunk()
    missing = [pl.col(name).fill_null(pl.lit(default).cast(table.schema[name])) for name, default in defaults.items()]
    known = table.drop_nulls(key(on[0]))
    direct = DirectTable.of(known[key(on[0])], known.select(list(defaults))) if len(on) == 1 else None
    if direct is not None:
        columns = {name: direct.get(name, pl.col(on[0])) for name in defaults}
        for row in table.filter(pl.col(key(on[0])).is_null()).iter_rows(named=True):  # one, if any
            is_null = pl.col(on[0]).is_null()
            columns = {name: pl.when(is_null).then(pl.lit(row[name])).otherwise(one) for name, one in columns.items()}
        types = {name: one.cast(table.schema[name]) for name, one in columns.items()}
        return lambda frame: frame.with_columns(**types).with_columns(missing)
    keys = [f"{key(name)} (nbdist)" for name in on]  # no columns of the user's
    table = table.rename(dict(zip(map(key, on), keys, strict=True)))
    same = [pl.col(name).cast(table.schema[one]).alias(one) for name, one in zip(on, keys, strict=True)]

    def run(frame: pl.LazyFrame) -> pl.LazyFrame:
        joined = frame.with_columns(same).join(
            table.lazy(), on=keys, how="left", nulls_equal=True, maintain_order="left"
        )
        return joined.with_columns(missing).drop(keys)

    return run


def _difference(step: DifferenceLag, names: Sequence[str]) -> Pipeline:
    return lambda frame: frame.with_columns(step.expressions(frame.collect_schema(), names))


def _replace(step: ColumnStep, names: Sequence[str]) -> Pipeline:
    return lambda frame: frame.with_columns(step.expressions(frame.collect_schema(), names))


def _cross(step: HashedCross) -> Pipeline:
    return lambda frame: frame.with_columns(step.expression(frame.collect_schema()))


def _drop(columns: Sequence[str]) -> Pipeline:
    return lambda frame: frame.drop(columns, strict=False)

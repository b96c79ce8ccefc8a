"""Steps that depend on other rows: `Filter`, which removes rows, and `DifferenceLag`, which compares a row with an
earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from .. import expressions
from ..inputs import Input, Reading
from .step import Saved, State, Step, names_of, require

_PER_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9}


class RowStep(Step):
    """A step that needs more than the row itself. It runs while rows are read, in the order of the input."""

    def over(self, given: Input, reading: Reading) -> Input:
        """Return the rows after this step; all ranks must call it."""
        raise NotImplementedError


class Filter(RowStep):
    """Keep the rows for which a polars expression is true: ``Filter(pl.col("rating") > 0)``.

    `Workflow.fit` does not learn from the other rows, and `Workflow.write` does not write them. Steps after this one do
    not see them, steps before it do. `Workflow.transform` and servers skip this step, because they answer every row. So
    the columns that it reads may be missing in a request.

    Args:
        condition: The expression. Rows for which it is null are left out. It may not depend on other rows, be random,
            or contain Python functions.

    Raises:
        TypeError, ValueError: The condition is not such an expression.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Categorify, Filter, Workflow
        >>> rows = pl.DataFrame({"user": ["ann", "bob", "bob"], "rating": [0, 4, 5]})
        >>> workflow = Workflow(Filter(pl.col("rating") > 0), Categorify("user")).fit(rows)
        >>> workflow.rows, workflow.vocabularies["user"].mapping()
        (2, {'bob': 2})
        >>> [pl.read_parquet(file).rows() for file in workflow.write(rows, "train", num_files=1, shuffle=False)]
        [[(2, 4), (2, 5)]]
    """

    kind = "filter"
    selects = True

    def __init__(self, condition: pl.Expr) -> None:
        expressions.check(condition, "Filter")
        if not expressions.reads(condition):
            raise ValueError(f"Filter: the condition must read at least one column, got {condition}")
        self.condition = condition

    def needs(self, wanted: set[str]) -> set[str]:
        return wanted.union(expressions.reads(self.condition))

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for column in expressions.reads(self.condition):
            require(column, schema, f"{where}: Filter")
        expressions.check_rows(self.condition, schema, f"{where}: Filter")
        dtype = pl.LazyFrame(schema=schema).select(it=self.condition).collect_schema()["it"]
        if dtype != pl.Boolean():
            raise ValueError(
                f"{where}: Filter: the condition must be true or false, got {self.condition} of type {dtype}"
            )
        return schema

    def over(self, given: Input, reading: Reading) -> Input:
        return given.filtered(self.condition, reading)

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return `columns`, the names of the columns that the condition reads, and `expression`, polars' JSON of the
        condition."""
        expression = expressions.to_json(self.condition, "Filter")
        return {"columns": expressions.reads(self.condition), "expression": expression}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Filter:
        return cls(expressions.from_json(described["expression"], "Filter", saved.polars))

    def __repr__(self) -> str:
        return f"Filter({self.condition})"


class DifferenceLag(RowStep):
    """Add the difference between a row's value and an earlier row's value, such as the time since a user's last click.

    Rows are compared in the order of the input: sort it by the key, and then by time. If the row `shift` places before
    has another key, or does not exist, the difference is null: see `FillMissing`. A request has no earlier row, so a
    server cannot do this step: send the column in the request.

    Args:
        *columns: The names of columns of numbers or dates.
        by: The key, a column or several, such as "user". Null is a key of its own.
        shift: The distance to the earlier row, in rows; below 0, to a later row. Several numbers add several columns.

    The new columns have the names ``<column>_difference_lag_<shift>``. They are int64, or the type of a float column.
    Differences of dates are days (int64); differences of dates with times are seconds (float64).

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import DifferenceLag, Workflow
        >>> rows = pl.DataFrame({"user": [1, 1, 2], "timestamp": [100, 160, 900]})
        >>> workflow = Workflow(DifferenceLag("timestamp", by="user")).fit(rows)
        >>> workflow.transform(rows).collect()["timestamp_difference_lag_1"].to_list()
        [None, 60, None]
    """

    kind = "difference_lag"
    options = ("by", "shift")
    not_served = "the difference from another row, and a request has no other rows"

    def __init__(self, *columns: str, by: str | Sequence[str], shift: int | Sequence[int] = 1) -> None:
        self.columns, self.by = names_of(columns), names_of(by)
        self.shift = [shift] if isinstance(shift, int) else list(shift)
        if not self.shift or 0 in self.shift or len(set(self.shift)) < len(self.shift):
            raise ValueError(
                f"DifferenceLag: `shift` must be a number of rows other than 0, or several different ones, got {shift}"
            )
        self._made = {f"{name}_difference_lag_{one}": (name, one) for name in self.columns for one in self.shift}
        self.adds = list(self._made)

    def reads(self, name: str) -> list[str]:
        return [self._made[name][0], *self.by]

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        numbers = [name for name in self.columns if not isinstance(schema.get(name), (pl.Date, pl.Datetime))]
        self._check_numbers(numbers, schema, where, booleans=False)
        for name in self.by:
            require(name, schema, f"{where}: DifferenceLag")
        self._check_new(schema, where)
        return pl.LazyFrame(schema=schema).with_columns(self._expressions(schema, self.adds, State())).collect_schema()

    def over(self, given: Input, reading: Reading) -> Input:
        made = [name for name in self.adds if self.needs({name}) <= given.schema.keys()]
        return given.with_columns(self._expressions(given.schema, made, State()), self.shift)

    def _expressions(self, schema: pl.Schema, names: Sequence[str], state: State) -> list[pl.Expr]:
        made = []
        for name in names:
            column, shift = self._made[name]
            dtype = schema[column]
            values = pl.col(column) if dtype.is_float() else pl.col(column).cast(pl.Int64)
            same = pl.all_horizontal(pl.col(one).eq_missing(pl.col(one).shift(shift)) for one in self.by)
            if dtype == pl.UInt64():  # modulo 2**64, which makes no difference to what fits into int64
                values = pl.col(column).reinterpret(signed=True)
            difference = values - values.shift(shift)
            if isinstance(dtype, pl.Datetime):
                difference = difference / _PER_SECOND[dtype.time_unit]
            made.append(pl.when(same).then(difference).alias(name))
        return made

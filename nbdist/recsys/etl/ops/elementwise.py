"""Steps that change each value of some columns separately: in training with polars, in a server with NumPy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import polars as pl

from ... import ranks
from ..kernels import Kernel
from .step import ROW, Query, State, Step, TrainingRows, names_of, require


class ColumnStep(Step):
    """A step that applies a function to each value of some columns.

    A server uses the function of `triton/served/preprocess.py` with the name of its `kind`.
    """

    def __init__(self, *columns: str) -> None:
        self.columns = self.adds = names_of(columns)

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        """Return the expression that replaces a column of this type."""
        raise NotImplementedError

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name in self.adds:
            require(name, schema, f"{where}: {type(self).__name__}")
            if not self._takes(schema[name]):
                raise ValueError(f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: {self._needed}")
        try:
            return pl.DataFrame(schema=schema).with_columns(self._expressions(schema, self.adds, State())).schema
        except (pl.exceptions.PolarsError, ValueError) as error:
            raise ValueError(f"{where}: {self}: {error}") from error

    def _expressions(self, schema: pl.Schema, names: Sequence[str], state: State) -> list[pl.Expr]:
        return [self._expression(pl.col(name), schema[name]).alias(name) for name in names]

    def num_codes(self, name: str, before: int | None, state: State) -> int | None:
        return before

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        options = {name: getattr(self, name) for name in self.options}
        return [Kernel(self.kind, [name], [name], options) for name in names]

    _needed = "numbers are needed"

    def _takes(self, dtype: pl.DataType) -> bool:
        return dtype.is_numeric()


class FillMissing(ColumnStep):
    """Replace nulls, and in floats NaN, by a value.

    In a request to a server, NaN stands for a missing float.

    Args:
        *columns: Names of columns of numbers.
        value: The replacement; it must have the columns' type.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import FillMissing, Workflow
        >>> rows = pl.DataFrame({"age": [30.0, None, float("nan")]})
        >>> Workflow(FillMissing("age", value=40)).fit(rows).transform(rows).collect()["age"].to_list()
        [30.0, 40.0, 40.0]
    """

    kind = "fill_missing"
    options = ("value",)

    def __init__(self, *columns: str, value: float) -> None:
        super().__init__(*columns)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"FillMissing: `value` must be a finite number, got {value!r}")
        self.value = value

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        if dtype.is_float():
            column = column.fill_nan(None)
        elif self.value != int(self.value):
            raise ValueError(f"FillMissing: `value` must be a value of {dtype}, got {self.value}")
        return column.fill_null(pl.lit(self.value).cast(dtype))


class Log(ColumnStep):
    """Replace numbers x by log(1 + x): for counts and prices with few very large values.

    The result is float64, or float32 if the column is.

    Args:
        *columns: Names of columns of numbers above -1; `fit` raises for other numbers. In later rows, -1 becomes -inf,
            and smaller numbers become NaN: see `Clip`.

    Raises:
        ValueError: In `fit`, a number is -1 or smaller. The error names its column and row.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Log, Workflow
        >>> rows = pl.DataFrame({"price": [0.0, 99.0]})
        >>> Workflow(Log("price")).fit(rows).transform(rows).collect()["price"].round(3).to_list()
        [0.0, 4.605]
    """

    kind = "log"

    def learn(self, rows: TrainingRows, state: State, previous: State) -> None:
        def first(frame: pl.LazyFrame) -> pl.LazyFrame:
            return frame.filter(pl.any_horizontal(pl.col(name).cast(pl.Float64) <= -1 for name in self.columns)).head(1)

        found: tuple[int, str, float] | None = None
        for (frame,) in rows.read("look for numbers without a logarithm", [Query([*self.columns, ROW], first)]):
            for row in () if found else frame.iter_rows(named=True):
                found = next((row[ROW], name, row[name]) for name in self.columns if (row[name] or 0) <= -1)
        for number, name, value in sorted(one for one in ranks.all_gather(found) if one)[:1]:
            raise ValueError(
                f"{rows.where}: Log: column {name!r} must have numbers above -1, got {value} in row {number}: put a "
                f"Clip({name!r}, min_value=0) before, or leave such rows out"
            )

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        return column.cast(pl.Float64).log1p().cast(pl.Float32 if dtype == pl.Float32 else pl.Float64)


class Clip(ColumnStep):
    """Replace numbers below a minimum by the minimum, and numbers above a maximum by the maximum.

    Args:
        *columns: Names of columns of numbers.
        min_value: The minimum. None or -inf: no minimum.
        max_value: The maximum. None or inf: no maximum.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Clip, Workflow
        >>> rows = pl.DataFrame({"age": [-1, 30, 230]})
        >>> Workflow(Clip("age", min_value=0, max_value=100)).fit(rows).transform(rows).collect()["age"].to_list()
        [0, 30, 100]
    """

    kind = "clip"
    options = ("min_value", "max_value")

    def __init__(self, *columns: str, min_value: float | None = None, max_value: float | None = None) -> None:
        super().__init__(*columns)
        min_value, max_value = _bound("min_value", min_value), _bound("max_value", max_value)
        if min_value is None and max_value is None:
            raise ValueError("Clip: give min_value=, max_value=, or both")
        if min_value is not None and max_value is not None and min_value > max_value:
            raise ValueError(f"Clip: `min_value` must be at most `max_value`, got {min_value} and {max_value}")
        self.min_value, self.max_value = min_value, max_value

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        bounds = self.min_value, self.max_value
        for bound in bounds:
            if bound is not None and not dtype.is_float() and bound != int(bound):
                raise ValueError(f"Clip: bounds must be values of {dtype}, got {bound}")
        if dtype.is_integer():  # a bound that is below, or above, all values of the type does nothing
            kind: Any = dtype
            least, most = pl.select(least=kind.min(), most=kind.max()).row(0)
            low, high = bounds
            bounds = (None if low is None or low <= least else low), (None if high is None or high >= most else high)
        return column.clip(*(None if bound is None else pl.lit(bound).cast(dtype) for bound in bounds))


def _bound(name: str, value: Any) -> float | None:
    """Return a bound of `Clip` for JSON: a finite number, or None if no value is beyond it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"Clip: `{name}` must be a number or None, got {value!r}")
    if math.isnan(value) or value == (math.inf if name == "min_value" else -math.inf):
        raise ValueError(f"Clip: `{name}` must not be NaN or {'inf' if name == 'min_value' else '-inf'}, got {value}")
    if math.isinf(value):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


class Bucketize(ColumnStep):
    """Replace numbers by codes of ranges: 0 for a missing value (null or NaN), 1 below the first boundary, and so on.

    A boundary belongs to the range above it. A table of the codes needs two rows more than there are boundaries.

    Args:
        *columns: Names of columns of numbers.
        boundaries: The boundaries between the ranges, in ascending order.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Bucketize, Workflow
        >>> rows = pl.DataFrame({"age": [7, 18, 70, None]})
        >>> Workflow(Bucketize("age", boundaries=[18, 65])).fit(rows).transform(rows).collect()["age"].to_list()
        [1, 2, 3, 0]
    """

    kind = "bucketize"
    options = ("boundaries",)

    def __init__(self, *columns: str, boundaries: Sequence[float]) -> None:
        super().__init__(*columns)
        self.boundaries = list(boundaries)
        finite = all(math.isfinite(one) for one in self.boundaries)
        if not self.boundaries or not finite or sorted(set(self.boundaries)) != self.boundaries:
            raise ValueError(f"Bucketize: `boundaries` must be rising finite numbers, got {self.boundaries}")

    def num_codes(self, name: str, before: int | None, state: State) -> int:
        return len(self.boundaries) + 2

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        known = column.cast(pl.Float64).fill_nan(None)
        above = pl.sum_horizontal((known >= boundary).cast(pl.Int64) for boundary in self.boundaries)
        return pl.when(known.is_null()).then(0).otherwise(1 + above).cast(pl.Int64)


class ListSlice(ColumnStep):
    """Cut lists to their first or last values.

    Args:
        *columns: Names of columns of lists.
        first: The number of first values to keep. Give either `first` or `last`.
        last: The number of last values to keep.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import ListSlice, Workflow
        >>> rows = pl.DataFrame({"history": [[1, 2, 3], [4]]})
        >>> Workflow(ListSlice("history", last=2)).fit(rows).transform(rows).collect()["history"].to_list()
        [[2, 3], [4]]
    """

    kind = "list_slice"
    options = ("first", "last")
    _needed = "lists are needed"

    def __init__(self, *columns: str, first: int | None = None, last: int | None = None) -> None:
        super().__init__(*columns)
        if (first is None) == (last is None) or min(first or 1, last or 1) < 1 or 0 in (first, last):
            raise ValueError(f"ListSlice: give one of `first` and `last`, at least 1, got {first} and {last}")
        self.first, self.last = first, last

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        return column.list.tail(self.last) if self.last is not None else column.list.head(self.first or 0)

    def _takes(self, dtype: pl.DataType) -> bool:
        return isinstance(dtype, pl.List)

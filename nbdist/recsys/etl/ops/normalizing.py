"""Numbers on a common scale, which is learned from the training rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import polars as pl

from ..kernels import Kernel
from ..moments import Aggregate, overall
from .statistics import StatisticsStep
from .step import State, names_of


class _Scale(StatisticsStep):
    """A step that replaces columns x by ``(x - shift) / scale``; float32."""

    squares: bool

    def __init__(self, *columns: str) -> None:
        self._numbers = self.columns = self.adds = self.learns = names_of(columns)

    def _aggregates(self) -> dict[str, Aggregate]:
        return {name: Aggregate((), name, self.squares) for name in self.columns}

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        self._check_numbers(self.columns, schema, where)
        return pl.Schema({**schema, **dict.fromkeys(self.columns, pl.Float32())})

    def _shift_and_scale(self, state: State, name: str) -> tuple[float, float]:
        """Return the numbers to subtract from a column and to divide it by."""
        seen = overall(self._learned(state, name))
        shift, scale = self._of(seen)
        # What differs by no more than values are rounded to is one value.
        rounding = 4 * sys.float_info.epsilon * max(abs(seen["min"]), abs(seen["max"]))
        return shift, scale if scale > rounding else 1.0

    def _expressions(self, schema: pl.Schema, names: Sequence[str], state: State) -> list[pl.Expr]:
        made = []
        for name in names:
            shift, scale = self._shift_and_scale(state, name)
            made.append(((pl.col(name).cast(pl.Float64) - shift) / scale).cast(pl.Float32).alias(name))
        return made

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return `columns`: names; `learnt`, the file; `shift`, `scale`: {column: number}. A value x becomes (x -
        shift) / scale."""
        both = {name: self._shift_and_scale(state, name) for name in self.columns}
        shift, scale = ({name: one[i] for name, one in both.items()} for i in range(2))
        return {**super().describe(number, state), "shift": shift, "scale": scale}

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        both = {name: self._shift_and_scale(state, name) for name in names}
        options = {name: {"shift": shift, "scale": scale} for name, (shift, scale) in both.items()}
        return [Kernel("normalize", [name], [name], options[name]) for name in names]

    def _of(self, seen: dict[str, float]) -> tuple[float, float]:
        raise NotImplementedError


class Normalize(_Scale):
    """Replace numbers by their distance from the mean of the training rows, in standard deviations; float32.

    Nulls and NaN are ignored and stay: see `FillMissing`. A column whose values are all equal becomes 0. The divisor of
    the variance is n - 1.

    Args:
        *columns: Names of columns of numbers or booleans.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Normalize, Workflow
        >>> rows = pl.DataFrame({"age": [20, 30, 40]})
        >>> workflow = Workflow(Normalize("age")).fit(rows)
        >>> workflow.transform(pl.DataFrame({"age": [30, 50]})).collect()["age"].to_list()
        [0.0, 2.0]
    """

    kind = "normalize"
    squares = True

    def _of(self, seen: dict[str, float]) -> tuple[float, float]:
        return seen["mean"], seen["std"]


class NormalizeMinMax(_Scale):
    """Replace numbers by their position between the minimum and the maximum of the training rows, 0 to 1; float32.

    Nulls and NaN are ignored and stay: see `FillMissing`. Values beyond the minimum and the maximum become less than 0
    or more than 1: see `Clip`. A column whose values are all equal becomes 0.

    Args:
        *columns: Names of columns of numbers or booleans.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import NormalizeMinMax, Workflow
        >>> rows = pl.DataFrame({"age": [20, 30, 40]})
        >>> workflow = Workflow(NormalizeMinMax("age")).fit(rows)
        >>> workflow.transform(pl.DataFrame({"age": [25, 50]})).collect()["age"].to_list()
        [0.25, 1.5]
    """

    kind = "normalize_min_max"
    squares = False

    def _of(self, seen: dict[str, float]) -> tuple[float, float]:
        return seen["min"], seen["max"] - seen["min"]

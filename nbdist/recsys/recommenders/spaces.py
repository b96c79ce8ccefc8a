"""The values of parameters that a search may try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...checks import check_flag, check_number


@dataclass(frozen=True)
class Range:
    """A range of numbers between two bounds, both included. If both bounds are integers, it has only integers.

    Raises:
        TypeError, ValueError: A bound is no number, `low` is not below `high`, or `low` is not above 0 with `log=True`.

    Examples:
        >>> from nbdist.recsys.recommenders.spaces import Range
        >>> Range(1e-4, 1.0, log=True)
        Range(low=0.0001, high=1.0, log=True)
    """

    low: float
    high: float
    log: bool = False
    """Draw evenly on a logarithmic scale."""

    def __post_init__(self) -> None:
        check_flag(self.log, name="`log`")
        check_number(self.low, least=-1e300, name="`low`")
        check_number(self.high, least=-1e300, name="`high`")
        if self.low >= self.high:
            raise ValueError(f"`low` must be below `high`, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"`low` must be above 0 on a logarithmic scale, got {self.low}")

    def is_whole(self) -> bool:
        """Return whether the range is of integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Space: TypeAlias = Range | Sequence[Any]
"""The space of a parameter: a range, or a sequence of values."""


def suggest(trial: Any, space: Mapping[str, Space]) -> dict[str, Any]:
    """Take a value of each parameter from a trial of optuna's."""
    found = {}
    for name, values in space.items():
        if not isinstance(values, Range):
            found[name] = trial.suggest_categorical(name, list(values))
        else:
            draw = trial.suggest_int if values.is_whole() else trial.suggest_float
            found[name] = draw(name, values.low, values.high, log=values.log)
    return found


def grid(values: Space) -> list[Any] | None:
    """Return all values of a space. None: there are infinitely many."""
    if not isinstance(values, Range):
        return list(values)
    return list(range(int(values.low), int(values.high) + 1)) if values.is_whole() else None


def number_of_settings(space: Mapping[str, Space]) -> float:
    """Return the number of different settings, which is infinity if a range has floats."""
    grids = [grid(values) for values in space.values()]
    return math.prod(math.inf if one is None else len(one) for one in grids)

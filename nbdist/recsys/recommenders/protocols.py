"""Protocols, which divide a log into training, validation and test rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import polars as pl

from ...checks import check_number
from ..etl.splitting import Split, leave_one_out, time_split


class SplitProtocol(Protocol):
    """The interface of a protocol, which divides a log into training, validation and test rows."""

    def split(self, log: pl.DataFrame, user: str, time: str) -> Split[pl.DataFrame]:
        """Divide a log."""
        ...


@dataclass(frozen=True)
class LeaveOneOut:
    """Take the last row of each user for the test, and the row before it for validation.

    Rows with the same time are ordered as in the log. All rows of users with fewer than three rows are training rows.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.recommenders import LeaveOneOut
        >>> log = pl.DataFrame({"user": [1, 1, 1], "item": ["a", "b", "c"], "day": [1, 2, 3]})
        >>> LeaveOneOut().split(log, "user", "day").test["item"].to_list()
        ['c']
    """

    def split(self, log: pl.DataFrame, user: str, time: str) -> Split[pl.DataFrame]:
        """Divide a log."""
        return leave_one_out(log, by=user, time=time)


@dataclass(frozen=True)
class ByTime:
    """Take the latest rows of the log for the test, and the rows before them for validation, as in real use.

    No model can know users and items that occur only in later rows; the comparison reports their numbers.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.recommenders import ByTime
        >>> log = pl.DataFrame({"user": [1] * 5, "item": list("abcde"), "day": range(5)})
        >>> ByTime(valid=0.2, test=0.2).split(log, "user", "day").test["item"].to_list()
        ['e']
    """

    valid: float = 0.1
    """The share of validation rows, above 0 and below 1."""
    test: float = 0.1
    """The share of test rows, above 0 and below 1."""

    def __post_init__(self) -> None:
        for name in ("valid", "test"):
            check_number(getattr(self, name), above=0, name=f"`{name}`")
        if self.valid + self.test >= 1:
            raise ValueError(f"`valid` and `test` must together be below 1, got {self.valid} and {self.test}")

    def split(self, log: pl.DataFrame, user: str, time: str) -> Split[pl.DataFrame]:
        """Divide a log."""
        return time_split(log, time=time, valid=float(self.valid), test=float(self.test))

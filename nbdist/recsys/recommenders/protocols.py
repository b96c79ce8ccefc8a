"""Rows that recommenders learn from, and hidden rows that measure them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import polars as pl

from ..etl.splitting import Split, leave_one_out, time_split


class SplitProtocol(Protocol):
    """Divides a log into rows to learn from, rows that choose among settings, and rows to be found."""

    def split(self, log: pl.DataFrame, user: str, time: str) -> Split[pl.DataFrame]:
        """Divide a log."""
        ...


@dataclass(frozen=True)
class LeaveOneOut:
    """Hide the last row of each user, and choose among settings by the row before it.

    Of rows of the same time, the later one in the log is the later one. Users with fewer than three rows are learned
    from alone.

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
    """Hide the latest rows of all users, and choose among settings by those before them: as in use.

    Users and items that first appear in hidden rows cannot be known: the comparison counts them.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.recommenders import ByTime
        >>> log = pl.DataFrame({"user": [1] * 5, "item": list("abcde"), "day": range(5)})
        >>> ByTime(valid=0.2, test=0.2).split(log, "user", "day").test["item"].to_list()
        ['e']
    """

    valid: float = 0.1
    """The part of the rows that chooses among settings, above 0 and below 1."""
    test: float = 0.1
    """The part of the rows to be found, above 0 and below 1."""

    def split(self, log: pl.DataFrame, user: str, time: str) -> Split[pl.DataFrame]:
        """Divide a log."""
        return time_split(log, time=time, valid=float(self.valid), test=float(self.test))

"""The names of a log's columns, and the rows of the log that a model learns from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from ..io.frames import Tabular
from .interactions import check_ids, check_no_nulls, check_ratings, columns_of

_JSON, _LOG = FILES = ("log.json", "log.parquet")
_FORMAT, _VERSION = "nbdist.recsys.fit_recommender", 1


@dataclass(frozen=True)
class LogColumns:
    """The names of a log's columns, and the rule for the rows that a model learns from."""

    user: str
    item: str
    time: str | None = None
    rating: str | None = None
    min_rating: float | None = None
    """The lowest rating of rows that the model learns from; rows without a rating are left out. None: it learns from
    all rows."""
    kind: str = "polars"
    """The library of the log's frame, and of the answers: "polars", "pandas" or "pyarrow"."""

    def columns(self) -> list[str]:
        """The columns that are used."""
        return [name for name in (self.user, self.item, self.time, self.rating) if name is not None]

    def read(self, log: Tabular, name: str = "log", more: Sequence[str] = ()) -> pl.DataFrame:
        """Read the columns that are used, and `more`. Raises `ValueError` if a column is missing or an id is null, and
        `TypeError` for ids or ratings of a wrong type."""
        rows = columns_of(log, *self.columns(), *more, name=name)
        if not len(rows):  # columns without values have any type
            return rows
        for one in (self.user, self.item):
            check_ids(rows[one])
        if self.rating is not None:
            check_ratings(rows[self.rating])
        return rows

    def read_history(self, rows: Tabular) -> pl.DataFrame:
        """Read the columns of users and items, and the column of ratings if there is one."""
        optional = () if self.rating is None else (self.rating,)
        found = columns_of(rows, self.user, self.item, optional=optional, name="history")
        for one in (self.user, self.item):
            check_no_nulls(found[one])
        if self.rating in found.columns:
            check_ratings(found[self.rating])
        return found

    def with_least(self, rating: float) -> LogColumns:
        """Return the same columns with this lowest rating of an item that the user likes."""
        return replace(self, min_rating=rating)

    def write(self, folder: Path, rows: pl.DataFrame) -> None:
        """Write the meaning of the columns and the rows of a log."""
        rows.write_parquet(folder / _LOG)
        description = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        (folder / _JSON).write_text(json.dumps(description, indent=1) + "\n", "utf8")

    @classmethod
    def load(cls, folder: Path) -> tuple[LogColumns, pl.DataFrame]:
        """Read the files that `write` has written. Raises `FileNotFoundError`, or `ValueError` for other files."""
        if not (folder / _JSON).exists():
            raise FileNotFoundError(f"{folder} must hold a recommender of fit_recommender, got no file {_JSON} there")
        try:
            described = json.loads((folder / _JSON).read_text("utf8"))
            if described.pop("format") != _FORMAT or described.pop("version") > _VERSION:
                raise ValueError("it is of a different format, or of a later version")
            columns = cls(**described)
            rows = pl.read_parquet(folder / _LOG, glob=False, hive_partitioning=False).select(columns.columns())
            return columns, rows
        except FileNotFoundError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, pl.exceptions.PolarsError) as error:
            raise ValueError(f"{folder}: not a saved recommender: {error}") from error

    def liked(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows that a model learns from."""
        if self.rating is None or self.rating not in rows.columns:
            return rows
        return rows.filter(ratings_of(pl.col(self.rating)) >= self.min_rating)

    def like(self, frame: pl.DataFrame) -> Any:
        """Return a frame of the log's library."""
        if self.kind == "polars":
            return frame
        return frame.to_pandas() if self.kind == "pandas" else frame.to_arrow()


def ratings_of(column: pl.Expr) -> pl.Expr:
    """Return ratings, which may be decimals, booleans or missing, as float64 or null."""
    return column.cast(pl.Float64).fill_nan(None)


def kind_of(log: Tabular) -> str:
    """Return the name of the library whose frames the answers for a log are: "polars", "pandas" or "pyarrow"."""
    top = type(log).__module__.partition(".")[0]
    return top if top in ("pandas", "pyarrow") else "polars"

"""The measurement of how well a model finds rows of a log that it has not learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl
import torch
from torch import Tensor

from ..io.frames import require_frame
from ..loader.columns import Ragged
from ..metrics.ranked_items import per_user
from ..retrieval.codes import codes_of
from .base import Recommender
from .interactions import Interactions, check_ids, check_times, ragged_of, rows_of_values
from .intervals import METRICS
from .protocols import SplitProtocol


class Fits(Protocol):
    """The two methods that `benchmark` needs of a recommender."""

    def fit(self, log: pl.DataFrame, *, user: str, item: str, time: str | None) -> Any:
        """Learn from a log."""
        ...

    def recommend(self, users: pl.Series, k: int) -> pl.DataFrame:
        """Return a row for each user, in the order of `users`, with the column `items`: ids of items that the user has
        not taken before, the best first."""
        ...


@dataclass(frozen=True, eq=False)
class Hidden:
    """The items that users took after a log ended, prepared once for all models."""

    users: pl.Series
    """The users who are measured, in the order of their ids."""
    ids: pl.Series
    """The ids of all items, taken before or to be found."""
    wanted: Ragged
    """The items to be found of each user, as indices into `ids`."""
    k: int

    @classmethod
    def of(cls, items: pl.Series, hidden: pl.DataFrame, user: str, item: str, k: int) -> Hidden:
        """Prepare rows of users and items. `items` are the ids of the items that were taken before."""
        users = hidden[user].unique().sort()
        ids = pl.concat([items, hidden[item]]).unique().sort()
        wanted = ragged_of(codes_of(hidden[user], users), codes_of(hidden[item], ids), len(users))
        return cls(users, ids, wanted, k)

    def metrics(self, lists: pl.Series) -> dict[str, Tensor]:
        """Return the metrics of each user. `lists` are the recommended ids for each user, the best first."""
        if len(lists) != len(self.users):
            raise ValueError(f"recommend must return a row for each of {len(self.users)} users, got {len(lists)}")
        flat = pl.DataFrame({"id": lists}).with_row_index("row").explode("id").drop_nulls("id")
        k = min(self.k, len(self.ids))
        flat = flat.with_columns(place=pl.int_range(pl.len()).over("row")).filter(pl.col("place") < k)
        row, place = (torch.from_numpy(flat[one].cast(pl.Int64).to_numpy(writable=True)) for one in ("row", "place"))
        ranked = torch.full((len(lists), k), -1)
        ranked[row, place] = torch.from_numpy(codes_of(flat["id"], self.ids))
        return per_user(ranked, self.wanted)[0]

    def segments(self, rows: pl.DataFrame, user: str, by: str) -> pl.Series:
        """Return the value of a column for each of the users. Raises `ValueError` for a user with two values."""
        pairs = rows.select(user, by).unique(maintain_order=True)
        if pairs[user].is_duplicated().any():
            twice = pairs.filter(pl.col(user).is_duplicated())
            raise ValueError(
                f"column {by!r} must have one value for each user, got {twice[by][0]!r} and others for user "
                f"{twice[user][0]!r}"
            )
        return pl.DataFrame({user: self.users}).join(pairs, on=user, how="left", maintain_order="left")[by]

    def table(self, lists: pl.Series, users: pl.Series, items: pl.Series) -> pl.DataFrame:
        """Return the means of the metrics of recommended lists, for all users, for the users in `users`, and for the
        other users; and the number of items to be found that are not in `items`."""
        values = self.metrics(lists)
        unknown = torch.from_numpy(codes_of(self.ids, items) < 0)[self.wanted.values]
        counts = rows_of_values(self.wanted)[unknown].bincount(minlength=len(self.users))
        each = pl.DataFrame({f"{name}@{self.k}": values[name].numpy() for name in METRICS})
        known = pl.Series(codes_of(self.users, users) >= 0)
        parts = {"all": known | ~known, "known": known, "new": ~known}
        tables = [
            each.with_columns(unknown_items=pl.Series(counts.numpy()))
            .filter(some)
            .select(
                pl.lit(name).alias("users"),
                pl.len().alias("count"),
                pl.exclude("unknown_items").mean(),
                pl.col("unknown_items").sum(),
            )
            for name, some in parts.items()
        ]
        return pl.concat(tables)


@dataclass(frozen=True, eq=False)
class Task:
    """A log that is divided into training, validation and test rows, with the measurement of models on it."""

    train: Interactions
    """The training rows with their users and items numbered, once for all settings of recommenders."""
    train_rows: pl.DataFrame
    known_rows: pl.DataFrame
    """Training and validation rows."""
    chooses: Hidden
    found: Hidden
    names: tuple[str, str, str]
    about: dict[str, Any]

    @classmethod
    def of(cls, log: pl.DataFrame, user: str, item: str, time: str, protocol: SplitProtocol, k: int) -> Task:
        """Divide a log by a protocol."""
        for name in (user, item):
            check_ids(log[name])
        check_times(log[time])
        train, valid, test = protocol.split(log, user, time)
        known = pl.concat([train, valid])
        new = [unseen(part, before, user, item) for part, before in ((valid, train), (test, known))]
        chooses, found = (
            part.join(before, on=user, how="semi", maintain_order="left")
            for part, before in zip(new, (train, known), strict=True)
        )
        for what, part in (("training", train), ("validation", chooses), ("the test", found)):
            if not len(part):
                raise ValueError(
                    f"`log` must have rows for {what}, got none of {len(log):,} rows with {protocol!r}: they must be "
                    "of users with earlier rows, and of items that these users have not taken before. "
                    "fit_recommender with a single model, such as models=EASE(100.0), compares none and needs no such "
                    "rows"
                )
        about = {
            "protocol": repr(protocol),
            "train": len(train),
            "valid": len(chooses),
            "test": len(found),
            "users": found[user].n_unique(),
            "items": known[item].n_unique(),
            "repeated": len(test) - len(new[1]),
            "cold_users": new[1].join(known, on=user, how="anti")[user].n_unique(),
            "cold_items": len(found.join(known, on=item, how="anti")),
        }
        return cls(
            Interactions.of(train, user, item, time),
            train,
            known,
            Hidden.of(train[item], chooses, user, item, k),
            Hidden.of(known[item], found, user, item, k),
            (user, item, time),
            about,
        )

    def validated(self, model: Fits) -> dict[str, Tensor]:
        """Learn from the training rows, and return the metrics of each user on the validation rows."""
        if isinstance(model, Recommender):
            model.fit_to(self.train)  # the same for all settings
        else:
            self._fit(model, self.train_rows)
        return self.chooses.metrics(_recommended(model, self.chooses))

    def tested(self, model: Fits) -> dict[str, Tensor]:
        """Learn from training and validation rows, and return the metrics of each user on the test rows."""
        self._fit(model, self.known_rows)
        return self.found.metrics(_recommended(model, self.found))

    def _fit(self, model: Fits, rows: pl.DataFrame) -> None:
        user, item, time = self.names
        model.fit(rows, user=user, item=item, time=time)


def _recommended(model: Fits, hidden: Hidden) -> pl.Series:
    """Return the recommended ids for each user. Raises `TypeError` or `ValueError` for another answer than a frame with
    the column `items`."""
    found = require_frame(model.recommend(hidden.users, hidden.k), "the result of recommend").lazy().collect()
    if "items" not in found.columns:
        raise ValueError(f"recommend must return a frame with a column 'items', got {', '.join(found.columns)}")
    return found["items"]


def unseen(rows: pl.DataFrame, before: pl.DataFrame, user: str, item: str) -> pl.DataFrame:
    """Return the rows whose user has not taken the item before."""
    return rows.join(before, on=[user, item], how="anti", maintain_order="left")

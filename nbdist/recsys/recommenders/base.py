"""The base class of recommenders: from a log to lists of raw ids."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor
from typing_extensions import Self

from ...checks import check_count
from ..io.frames import Tabular, series_of
from ..loader.columns import Ragged
from ..retrieval.index import frame_of_best
from .interactions import Interactions, codes_of, lists_of, part_of
from .spaces import Space

_BLOCK = 1 << 23
"""Scores that are in memory at a time."""


class Recommender(abc.ABC):
    """A model that scores items by the items that a user has taken.

    A subclass learns in `_learn` and scores histories in `_scores`. In ranks, all of them call `fit` with the same log.
    """

    SPACE: ClassVar[Mapping[str, Space]] = {}
    """Values that `benchmark` tries, by the name of the parameter."""

    _log: Interactions | None = None

    def fit(self, log: Tabular, *, user: str = "user", item: str = "item", time: str | None = None) -> Self:
        """Learn from a log.

        Args:
            log: A row for each time that a user has taken an item: a frame of polars or pandas, an Arrow table, or a
                dict of columns.
            user: The column of users' ids: integers, strings or dates, none null.
            item: The column of items' ids.
            time: The column of times, for models that use them.

        Returns:
            The recommender itself.

        Raises:
            TypeError: `log` is no frame, or ids are of another type.
            ValueError: A column is missing, an id is null, or there are no rows.
            MemoryError: The model would not fit into memory.
        """
        interactions = Interactions.of(log, user, item, time)
        self._learn(interactions)
        self._log = interactions
        return self

    @property
    def users(self) -> pl.Series:
        """Ids of the users of the log."""
        return self._fitted.users

    @property
    def items(self) -> pl.Series:
        """Ids of the items of the log."""
        return self._fitted.items

    def recommend(self, users: Any, k: int = 10, *, exclude_taken: bool = True) -> pl.DataFrame:
        """Find the items with the highest scores for users of the log.

        Args:
            users: Ids: a list, or a column of polars, pandas or Arrow.
            k: The number of items for each user.
            exclude_taken: Leave out items that the user has taken.

        Returns:
            A row for each user: `user`, `items` (a list of ids, the best first) and `scores`. A list is shorter than k
            where fewer items are left.

        Raises:
            KeyError: A user is not in the log: `recommend_for` takes a history.
        """
        ids = series_of(users, "user").alias("user")
        codes = codes_of(ids, self.users)
        if (codes < 0).any():
            missing = ids.filter(pl.Series(codes < 0))
            raise KeyError(
                f"{len(missing)} of {len(ids)} users are not in the log, the first is {missing[0]!r}: "
                f"recommend_for(histories) takes the items that a new user has taken"
            )
        found = self._best(part_of(self._fitted.taken, torch.from_numpy(codes)), k, exclude_taken)
        return found.insert_column(0, ids)

    def recommend_for(
        self, histories: Sequence[Sequence[Any]] | pl.Series, k: int = 10, *, exclude_taken: bool = True
    ) -> pl.DataFrame:
        """Find the items with the highest scores for users that the log does not have.

        Args:
            histories: For each user, the ids of the items that the user has taken; ids that the log lacks are passed
                over.
            k: The number of items for each user.
            exclude_taken: Leave out items of the history.

        Returns:
            As `recommend`, without the column of users.
        """
        return self._best(lists_of(histories, self.items), k, exclude_taken)

    @property
    def _fitted(self) -> Interactions:
        if self._log is None:
            raise RuntimeError(f"{type(self).__name__} has learned from no log yet: call fit(log) first")
        return self._log

    def _best(self, histories: Ragged, k: int, exclude_taken: bool) -> pl.DataFrame:
        check_count(k, least=1, name="`k`")
        items = self.items
        tables = []
        for rows in blocks(len(histories.lengths), max(1, _BLOCK // len(items))):
            part = part_of(histories, rows)
            scores = self._scores(part)
            if exclude_taken:
                scores[torch.arange(len(rows)).repeat_interleave(part.lengths), part.values] = -torch.inf
            best, places = _first(scores, min(k, len(items)))
            places[best == -torch.inf] = -1
            tables.append(frame_of_best(items, best, places))
        kinds = {"items": pl.List(items.dtype), "scores": pl.List(pl.Float32)}
        return pl.concat([pl.DataFrame(schema=kinds), *tables])

    @abc.abstractmethod
    def _learn(self, log: Interactions) -> None:
        """Learn from a log."""

    @abc.abstractmethod
    def _scores(self, histories: Ragged) -> Tensor:
        """Return a score for each history and item, float32, shape (histories, items)."""


def _first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of each row and their places; of equal scores, the one of the first place."""
    best, places = scores.topk(k)
    # topk chooses among equal scores as it likes. So all that are above the last one, and then the first of its equals.
    tied = (scores == best[:, -1:]).sum(1) > (best == best[:, -1:]).sum(1)
    for row in tied.nonzero().flatten().tolist():
        order = scores[row].argsort(descending=True, stable=True)[:k]
        best[row], places[row] = scores[row, order], order
    order = torch.argsort(places, dim=1, stable=True)
    best, places = best.gather(1, order), places.gather(1, order)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)


def blocks(rows: int, height: int) -> Iterator[Tensor]:
    """Numbers of rows, `height` at a time."""
    for first in range(0, rows, height):
        yield torch.arange(first, min(rows, first + height))

"""The items that most users take, of late if wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import check_number
from ..loader.columns import Ragged
from .base import Recommender
from .interactions import Interactions
from .spaces import Space


class Popularity(Recommender):
    """Recommend what was taken most often: the least that any other model must exceed.

    Args:
        half_life: A row counts half as much for each such span before the log's last row, in units of the time column
            (of dates: days; of datetimes: their unit). None: all rows count alike.

    Raises:
        TypeError, ValueError: `half_life` is not a number above 0.

    Examples:
        >>> from nbdist.recsys.recommenders import Popularity
        >>> log = {"user": [1, 2, 3, 1], "item": ["a", "a", "b", "c"], "time": [0, 0, 100, 90]}
        >>> Popularity().fit(log).recommend([3], 2)["items"].to_list()
        [['a', 'c']]
        >>> Popularity(half_life=10).fit(log, time="time").recommend([2], 2)["items"].to_list()
        [['b', 'c']]
    """

    SPACE: ClassVar[Mapping[str, Space]] = {}
    ARRAYS = ("_counts",)

    def __init__(self, half_life: float | None = None) -> None:
        if half_life is not None:
            check_number(half_life, above=0, name="`half_life`")
        self.half_life = half_life

    @classmethod
    def of_taken(cls, model: Recommender) -> Popularity:
        """Return what most users of another model's log have taken."""
        popular = cls()
        popular._counts = model.taken.values.bincount(minlength=len(model.items)).float()
        popular._log = model._fitted
        return popular

    def _learn(self, log: Interactions) -> None:
        assert log.item_of_row is not None
        weights = torch.ones(len(log.item_of_row), dtype=torch.float64)
        if self.half_life is not None:
            if log.time_of_row is None:
                raise ValueError("`time` must name the column of times where `half_life` is given, got None")
            age = log.time_of_row.nan_to_num(-torch.inf).max() - log.time_of_row
            weights = torch.exp2(-age / self.half_life).nan_to_num(0.0)
        self._counts: Tensor = log.item_of_row.bincount(weights, minlength=len(log.items)).float()

    def _scores(self, histories: Ragged) -> Tensor:
        return self._counts.repeat(len(histories.lengths), 1)

    def _similarities(self, items: Ragged) -> Tensor:
        raise ValueError("Popularity has no similar items, since it counts each by itself: ItemKNN, EASE and IALS have")

    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, float]:
        return torch.zeros(len(taken)), float(self._counts[item])

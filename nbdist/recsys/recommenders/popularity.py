"""The items that most users take, overall or recently."""

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
    """Recommend the items that were taken most often: the baseline that any other model must exceed.

    Args:
        half_life: The time after which a row counts half, before the log's last row, in units of the time column
            (dates: days; datetimes: the unit of their type). None: all rows count equally.

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
        """Make a model that recommends the items that most users in another model's log have taken."""
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
        raise ValueError("Popularity has no similar items, since it does not compare items: use ItemKNN, EASE or IALS")

    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, float]:
        return torch.zeros(len(taken)), float(self._counts[item])

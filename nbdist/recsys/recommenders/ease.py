"""EASE: a linear model of each item by all others, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import check_number
from ...system.free_memory import check_fits
from ..loader.columns import Ragged
from .base import Recommender
from .gram import columns_of_gram
from .interactions import Interactions, sums_of
from .spaces import Range, Space


class EASE(Recommender):
    """Embarrassingly shallow autoencoders (Steck, WWW 2019): an item's score is a weighted sum of the items taken.

    The weights solve a ridge regression of each item on all others. Fitting takes 16 bytes of memory for each pair of
    items: 6.4 GB for 20,000 items.

    Args:
        regularization: The strength of the regression's L2 penalty, above 0.

    Raises:
        TypeError, ValueError: `regularization` is not a number above 0.

    Examples:
        >>> from nbdist.recsys.recommenders import EASE
        >>> log = {"user": [1, 1, 2, 2, 3, 4], "item": ["a", "b", "a", "b", "a", "c"]}
        >>> EASE(regularization=1.0).fit(log).recommend([3], 1)["items"].to_list()
        [['b']]
    """

    SPACE: ClassVar[Mapping[str, Space]] = {"regularization": Range(10.0, 10_000.0, log=True)}
    ARRAYS = ("_weights",)

    def __init__(self, regularization: float = 500.0) -> None:
        check_number(regularization, above=0, name="`regularization`")
        self.regularization = regularization

    def _learn(self, log: Interactions) -> None:
        count = len(log.items)
        check_fits(16 * count**2, f"EASE of {count:,} items, which needs 16 bytes for each pair of them")
        gram = torch.empty(count, count, dtype=torch.float64)
        for places, counts in columns_of_gram(log.taken, count):
            gram[:, places] = counts.double()
        gram.diagonal().add_(self.regularization)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        del gram
        weights = inverse.div_(-inverse.diagonal().clone())
        self._weights: Tensor = weights.fill_diagonal_(0.0).float()  # (taken, scored)

    def _scores(self, histories: Ragged) -> Tensor:
        return sums_of(histories, self._weights)

    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, None]:
        return self._weights[taken, item], None

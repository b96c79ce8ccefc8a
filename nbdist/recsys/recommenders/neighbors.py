"""Items that are taken by the same users."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ...checks import check_count, check_number
from ..loader.columns import Ragged
from .base import Recommender
from .gram import columns_of_gram
from .interactions import Interactions, part_of, rows_of_values, transposed
from .spaces import Range, Space


class ItemKNN(Recommender):
    """Recommend the neighbors of the items taken, by the cosine of the users who took both (Sarwar et al., WWW 2001).

    Args:
        neighbors: The number of most similar items that are kept for each item.
        shrinkage: Added to the denominator of the cosine, at least 0: items with few users count less.

    Raises:
        TypeError, ValueError: An argument is no number, or out of its range.

    Examples:
        >>> from nbdist.recsys.recommenders import ItemKNN
        >>> log = {"user": [1, 1, 2, 2, 3, 4], "item": ["a", "b", "a", "b", "a", "c"]}
        >>> ItemKNN(neighbors=2).fit(log).recommend([3], 1)["items"].to_list()
        [['b']]
    """

    SPACE: ClassVar[Mapping[str, Space]] = {
        "neighbors": Range(5, 500, log=True),
        "shrinkage": Range(0.1, 200.0, log=True),
    }
    ARRAYS = ("_places", "_cosines")

    def __init__(self, neighbors: int = 100, shrinkage: float = 10.0) -> None:
        self.neighbors = check_count(neighbors, least=1, name="`neighbors`")
        check_number(shrinkage, name="`shrinkage`")
        self.shrinkage = shrinkage

    def _learn(self, log: Interactions) -> None:
        count = len(log.items)
        norms = log.taken.values.bincount(minlength=count).float().sqrt()
        k = min(self.neighbors, count)
        values, places = torch.empty(count, k), torch.empty(count, k, dtype=torch.int64)
        for scored, counts in columns_of_gram(log.taken, count):
            cosines = counts / (norms[:, None] * norms[scored] + self.shrinkage)
            cosines[scored, torch.arange(len(scored))] = 0.0
            values[scored], places[scored] = (part.T for part in cosines.topk(k, dim=0))
        self._places, self._cosines = places, values  # (scored, k)
        vars(self).pop("_pairs", None)

    def _scores(self, histories: Ragged) -> Tensor:
        """Add up the cosines of the pairs of the items taken only: most items are no neighbors of these."""
        count, k = self._places.shape
        pairs = part_of(self._pairs, histories.values)
        users = rows_of_values(histories).repeat_interleave(pairs.lengths)
        scores = torch.zeros(len(histories.lengths), count)
        scores.view(-1).index_add_(0, users * count + pairs.values // k, self._cosines.flatten()[pairs.values])
        return scores

    @cached_property
    def _pairs(self) -> Ragged:
        """The numbers of the elements of `_places` and `_cosines` that belong to each item taken."""
        taken = self._places.flatten()
        return transposed(Ragged(taken, torch.arange(len(taken) + 1)), len(self._places))

    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, None]:
        same = self._places[item] == taken[:, None]
        return (same * self._cosines[item]).sum(1), None

"""Implicit alternating least squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import check_count, check_number
from .. import ranks
from ..loader.columns import Ragged
from .base import Recommender
from .interactions import Interactions, part_of, transposed
from .spaces import Range, Space

_BLOCK = 1 << 22
"""Numbers of vectors that are gathered at a time."""


class IALS(Recommender):
    """Matrix factorization of what was taken and what was not (Hu et al. 2008), set up as in Rendle et al. 2022.

    Minimizes the sum of (1 - score)² over pairs that were taken, of `unobserved_weight` · score² over all pairs, and of
    the vectors' squared lengths, each scaled by how often its row counts (arXiv:2110.14037). Each step is solved
    exactly. In ranks, each solves for a part of the users and items.

    Args:
        dim: Numbers in a vector.
        regularization: Of the vectors, above 0.
        unobserved_weight: The weight of pairs that were not taken, above 0.
        iterations: Times that users and items are solved for.
        seed: Of the first vectors.

    Raises:
        TypeError, ValueError: An argument is no such number.

    Examples:
        >>> from nbdist.recsys.recommenders import IALS
        >>> log = {"user": [1, 1, 2, 2, 3, 4], "item": ["a", "b", "a", "b", "a", "c"]}
        >>> IALS(dim=2).fit(log).recommend([3], 1)["items"].to_list()
        [['b']]
    """

    SPACE: ClassVar[Mapping[str, Space]] = {
        "dim": (16, 32, 64, 128),
        "regularization": Range(1e-4, 0.1, log=True),
        "unobserved_weight": Range(0.003, 1.0, log=True),
    }

    def __init__(
        self,
        dim: int = 64,
        regularization: float = 0.003,
        unobserved_weight: float = 0.1,
        iterations: int = 16,
        seed: int = 0,
    ) -> None:
        self.dim = check_count(dim, least=1, name="`dim`")
        check_number(regularization, above=0, name="`regularization`")
        check_number(unobserved_weight, above=0, name="`unobserved_weight`")
        self.regularization, self.unobserved_weight = regularization, unobserved_weight
        self.iterations = check_count(iterations, least=1, name="`iterations`")
        self.seed = check_count(seed, least=0, name="`seed`")

    def _learn(self, log: Interactions) -> None:
        takers = transposed(log.taken, len(log.items))
        draw = torch.Generator().manual_seed(self.seed)
        self._vectors: Tensor = torch.randn(len(log.items), self.dim, generator=draw) * (0.1 / self.dim**0.5)
        for _ in range(self.iterations):
            users = self._solve(log.taken, self._vectors)
            self._vectors = self._solve(takers, users)

    def _scores(self, histories: Ragged) -> Tensor:
        users = self._solve(histories, self._vectors, shared=False)
        return users @ self._vectors.T

    def _solve(self, lists: Ragged, vectors: Tensor, *, shared: bool = True) -> Tensor:
        """Return the best vector for each list of `vectors`, shape (lists, dim). Ranks divide `shared` lists."""
        found = torch.zeros(len(lists.lengths), self.dim)
        everyone = self.unobserved_weight * (vectors.T @ vectors)
        filled = torch.cat([vectors, vectors.new_zeros(1, self.dim)])
        order = lists.lengths.argsort(descending=True, stable=True)
        if shared:
            order = order[ranks.rank() :: ranks.world_size()]
        lengths = lists.lengths[order]
        first = 0
        while first < len(order):
            longest = max(1, int(lengths[first]))
            # Lists of about the same length go together: at most a fifth of what is gathered are zeros.
            stop = int(torch.searchsorted(-lengths, -0.8 * longest, right=True)) if longest > 8 else len(order)
            stop = max(first + 1, min(stop, first + _BLOCK // (longest * self.dim)))
            rows = order[first:stop]
            part = part_of(lists, rows)
            padded = torch.full((len(rows), longest), len(vectors))
            padded[torch.arange(longest) < part.lengths[:, None]] = part.values
            gathered = filled[padded]  # (rows, longest, dim)
            weight = part.lengths + self.unobserved_weight * len(vectors)
            system = torch.baddbmm(everyone.expand(len(rows), -1, -1), gathered.transpose(1, 2), gathered)
            system.diagonal(dim1=1, dim2=2).add_(self.regularization * weight[:, None])
            factor = torch.linalg.cholesky(system)
            found[rows] = torch.cholesky_solve(gathered.sum(1)[..., None], factor)[..., 0]
            first = stop
        if shared and ranks.world_size() > 1:
            dist.all_reduce(found)  # each row is of one rank, and 0 on the others
        return found

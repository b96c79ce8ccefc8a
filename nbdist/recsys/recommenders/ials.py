"""Implicit alternating least squares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

from ...checks import check_count, check_number
from .. import ranks
from ..loader.columns import Ragged
from .base import Recommender
from .interactions import Interactions, transposed
from .least_squares import Block, LeastSquares, blocks_of
from .spaces import Range, Space


class IALS(Recommender):
    """Matrix factorization of implicit feedback (Hu et al. 2008), with the settings of Rendle et al. 2022.

    Each user and each item has a vector; a score is the product of two vectors. Fitting minimizes the sum of
    (1 - score)² over the pairs that were taken, of `unobserved_weight` · score² over all pairs, and of the vectors'
    squared lengths, each scaled by the weight of its row (arXiv:2110.14037). In a function that runs on several ranks,
    each rank solves for a part of the users and items.

    Args:
        dim: The number of elements of a vector.
        regularization: The weight of the squared lengths of the vectors, above 0.
        unobserved_weight: The weight of score² of all pairs, above 0.
        iterations: The number of times that the vectors of users and items are solved for.
        seed: The seed of the initial vectors.
        solver_steps: The number of steps of conjugate gradients for a vector in an iteration, as in Takács et al.
            (RecSys 2011). None: each vector is solved for exactly, by Cholesky decomposition, which takes longer.

    Raises:
        TypeError, ValueError: An argument is no number, or out of its range.

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
    ARRAYS = ("_vectors",)

    def __init__(
        self,
        dim: int = 64,
        regularization: float = 0.003,
        unobserved_weight: float = 0.1,
        iterations: int = 16,
        seed: int = 0,
        solver_steps: int | None = 2,
    ) -> None:
        self.dim = check_count(dim, least=1, name="`dim`")
        check_number(regularization, above=0, name="`regularization`")
        check_number(unobserved_weight, above=0, name="`unobserved_weight`")
        self.regularization, self.unobserved_weight = regularization, unobserved_weight
        self.iterations = check_count(iterations, least=1, name="`iterations`")
        self.seed = check_count(seed, least=0, name="`seed`")
        self.solver_steps = None if solver_steps is None else check_count(solver_steps, least=1, name="`solver_steps`")

    def _learn(self, log: Interactions) -> None:
        takers = transposed(log.taken, len(log.items))
        draw = torch.Generator().manual_seed(self.seed)
        self._vectors: Tensor = torch.randn(len(log.items), self.dim, generator=draw) * (0.1 / self.dim**0.5)
        users = torch.zeros(len(log.users), self.dim)
        of_users = self._mine(log.taken, len(log.items))
        of_items = self._mine(takers, len(log.users))
        for _ in range(self.iterations):
            users = self._solved(of_users, self._vectors, users)
            self._vectors = self._solved(of_items, users, self._vectors)

    def _mine(self, lists: Ragged, vectors: int) -> list[Block]:
        """Return the lists that this rank solves for. Each rank gets lists of all lengths."""
        rows = lists.lengths.argsort(descending=True, stable=True)[ranks.rank() :: ranks.world_size()]
        return list(blocks_of(lists, rows, vectors, self.dim))

    def _solved(self, mine: list[Block], vectors: Tensor, start: Tensor) -> Tensor:
        """Return a vector for each list, gathered from all ranks."""
        found = torch.zeros_like(start)
        for block in mine:
            found[block.rows] = start[block.rows]
        self._squares.solve(mine, vectors, found, self.solver_steps)
        if ranks.world_size() > 1:
            dist.all_reduce(found)  # each row is of one rank, and 0 on the others
        return found

    @property
    def _squares(self) -> LeastSquares:
        return LeastSquares(self.regularization, self.unobserved_weight)

    def _blocks(self, lists: Ragged) -> Iterator[Block]:
        return blocks_of(lists, torch.arange(len(lists.lengths)), len(self._vectors), self.dim)

    def _scores(self, histories: Ragged) -> Tensor:
        users = torch.zeros(len(histories.lengths), self.dim)
        self._squares.solve(self._blocks(histories), self._vectors, users, None)
        return users @ self._vectors.T

    def _similarities(self, items: Ragged) -> Tensor:
        directions = normalize(self._vectors)
        return directions[items.values] @ directions.T

    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, None]:
        # The score is a sum over the items taken: (the inverse of the user's system times the item) · the item taken.
        lists, weighted = Ragged(taken, torch.tensor([0, len(taken)])), torch.zeros(1, self.dim)
        self._squares.applied(self._blocks(lists), self._vectors, self._vectors[item], weighted)
        return self._vectors[taken] @ weighted[0], None

"""Implicit alternating least squares."""

from __future__ import annotations

from collections.abc import Mapping
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
from .least_squares import Systems
from .spaces import Range, Space


class IALS(Recommender):
    """Matrix factorization of what was taken and what was not (Hu et al. 2008), set up as in Rendle et al. 2022.

    Minimizes the sum of (1 - score)² over pairs that were taken, of `unobserved_weight` · score² over all pairs, and of
    the vectors' squared lengths, each scaled by how often its row counts (arXiv:2110.14037). In ranks, each
    solves for a part of the users and items.

    Args:
        dim: Numbers in a vector.
        regularization: Of the vectors, above 0.
        unobserved_weight: The weight of pairs that were not taken, above 0.
        iterations: Times that users and items are solved for.
        seed: Of the first vectors.
        solver_steps: Steps of conjugate gradients in which a vector comes closer to the best one in an iteration, as
            in Takács et al. (RecSys 2011). None: each is the best one, by Cholesky's method, which takes longer.

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
    ARRAYS = ("_vectors",)

    def __init__(
        self,
        dim: int = 64,
        regularization: float = 0.003,
        unobserved_weight: float = 0.1,
        iterations: int = 16,
        seed: int = 0,
        solver_steps: int | None = 3,
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
        for _ in range(self.iterations):
            users = self._solved(log.taken, self._vectors, users)
            self._vectors = self._solved(takers, users, self._vectors)

    def _solved(self, lists: Ragged, vectors: Tensor, start: Tensor) -> Tensor:
        """Return a vector for each list. Each rank solves for a part of them."""
        found = torch.zeros_like(start)
        # Every rank gets lists of all lengths.
        rows = lists.lengths.argsort(descending=True, stable=True)[ranks.rank() :: ranks.world_size()]
        found[rows] = self._systems(lists, vectors).solved(rows, start, self.solver_steps)
        if ranks.world_size() > 1:
            dist.all_reduce(found)  # each row is of one rank, and 0 on the others
        return found

    def _systems(self, lists: Ragged, vectors: Tensor) -> Systems:
        return Systems(lists, vectors, self.regularization, self.unobserved_weight)

    def _scores(self, histories: Ragged) -> Tensor:
        rows = torch.arange(len(histories.lengths))
        return self._systems(histories, self._vectors).solved(rows, None, None) @ self._vectors.T

    def _similarities(self, items: Ragged) -> Tensor:
        directions = normalize(self._vectors)
        return directions[items.values] @ directions.T

    def _contributions(self, taken: Tensor, item: int) -> tuple[Tensor, None]:
        # The score is a sum over the items taken: (the inverse of the user's system times the item) · the item taken.
        lists = Ragged(taken, torch.tensor([0, len(taken)]))
        (weighted,) = self._systems(lists, self._vectors).applied(self._vectors[item])
        return self._vectors[taken] @ weighted, None

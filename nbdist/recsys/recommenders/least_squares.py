"""The vectors that fit lists of items best: regularized least squares over what is in a list and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..loader.columns import Ragged

_BLOCK = 1 << 19
"""Numbers that are gathered at a time: as many as stay in a core's cache."""
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Systems:
    """For each list x, the minimum over x of the sum of (1 - x·v)² over the vectors v in the list, of
    `unobserved_weight` · (x·v)² over all vectors, and of `regularization` · n · |x|², with n the weights of both sums.
    """

    lists: Ragged
    """Places of vectors."""
    vectors: Tensor
    """Shape (vectors, dim)."""
    regularization: float
    unobserved_weight: float

    def solved(self, rows: Tensor, start: Tensor | None, steps: int | None) -> Tensor:
        """Return the best vectors of some lists, shape (rows, dim).

        Args:
            rows: Which lists.
            start: Where conjugate gradients start, shape (lists, dim). None: from 0.
            steps: The number of steps of conjugate gradients. None: an exact solution.
        """
        found = self.vectors.new_zeros(len(rows), self.vectors.shape[1])
        everyone = self._everyone()
        for places, gathered, ridge in self._blocks(rows):
            if steps is None:
                wanted = gathered.sum(1)
                found[places] = _exactly(gathered, everyone, ridge, wanted)
            else:
                first = torch.zeros_like(found[places]) if start is None else start[rows[places]]
                found[places] = _descended(gathered, everyone, ridge, first, steps)
        return found

    def applied(self, target: Tensor) -> Tensor:
        """Return for each list the inverse of its system times a vector: what its own sum of vectors is multiplied by
        in the score of this vector. Shape (lists, dim)."""
        rows = torch.arange(len(self.lists.lengths))
        found = self.vectors.new_zeros(len(rows), len(target))
        for places, gathered, ridge in self._blocks(rows):
            found[places] = _exactly(gathered, self._everyone(), ridge, target.expand(len(places), -1))
        return found

    def _everyone(self) -> Tensor:
        return self.unobserved_weight * (self.vectors.T @ self.vectors)

    def _blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Lists of about the same length: places in `rows`, their vectors, shape (lists, longest, dim), 0 where a list
        is shorter; and the weight of |x|²."""
        count, dim = self.vectors.shape
        filled = torch.cat([self.vectors, self.vectors.new_zeros(1, dim)])
        values = torch.cat([self.lists.values, self.lists.values.new_tensor([count])])  # no list is without a value
        order = self.lists.lengths[rows].argsort(descending=True, stable=True)
        lengths, starts = self.lists.lengths[rows][order], self.lists.offsets[rows][order]
        first = 0
        while first < len(order):
            longest = max(1, int(lengths[first]))
            # At most a fifth of what is gathered are zeros.
            stop = int(torch.searchsorted(-lengths, -0.8 * longest, right=True)) if longest > 4 else len(order)
            stop = max(first + 1, min(stop, first + _BLOCK // (longest * dim)))
            within = torch.arange(longest)
            part = (starts[first:stop, None] + within).clamp_(max=len(values) - 1)
            padded = values[part].masked_fill_(within >= lengths[first:stop, None], count)
            gathered = filled.index_select(0, padded.flatten()).view(stop - first, longest, dim)
            weights = lengths[first:stop] + self.unobserved_weight * count
            yield order[first:stop], gathered, (self.regularization * weights)[:, None]
            first = stop


def _exactly(gathered: Tensor, everyone: Tensor, ridge: Tensor, wanted: Tensor) -> Tensor:
    systems = torch.baddbmm(everyone.expand(len(gathered), -1, -1), gathered.mT, gathered)
    systems.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.cholesky_solve(wanted[..., None], torch.linalg.cholesky(systems))[..., 0]


def _descended(gathered: Tensor, everyone: Tensor, ridge: Tensor, x: Tensor, steps: int) -> Tensor:
    """Return x after some steps of conjugate gradients (Takács et al., RecSys 2011); no system is written down."""

    def products(vectors: Tensor) -> Tensor:  # with each vector of the list, shape (lists, 1, longest)
        return torch.bmm(vectors[:, None], gathered.mT)

    residual = torch.bmm(1 - products(x), gathered)[:, 0] - x @ everyone - ridge * x
    direction, size = residual, residual.square().sum(1, keepdim=True)
    for _ in range(steps):
        image = torch.bmm(products(direction), gathered)[:, 0] + direction @ everyone + ridge * direction
        length = size / (direction * image).sum(1, keepdim=True).clamp_min(_TINY)
        x = x + length * direction
        residual = residual - length * image
        before, size = size, residual.square().sum(1, keepdim=True)
        direction = residual + size / before.clamp_min(_TINY) * direction
    return x

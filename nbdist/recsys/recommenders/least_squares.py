"""The vector for each list of items, from the items' vectors: the solution of a regularized least-squares problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..loader.columns import Ragged

_BLOCK = 1 << 19
"""The largest number of elements to gather at a time. They stay in a core's cache."""
_SMALL = 1 << 17
"""The number of elements of a block below which its function calls cost more than its padding."""
_TINY = 1e-30


class Block(NamedTuple):
    """Lists of about the same length, padded to the longest."""

    rows: Tensor
    """The numbers of the lists."""
    padded: Tensor
    """The indices of vectors, shape (lists, longest). Shorter lists are padded with the number of vectors."""
    lengths: Tensor


def blocks_of(lists: Ragged, rows: Tensor, vectors: int, dim: int) -> Iterator[Block]:
    """Divide some lists of indices of vectors into blocks."""
    values = torch.cat([lists.values, lists.values.new_tensor([vectors])])  # no list is without a value
    order = rows[lists.lengths[rows].argsort(descending=True, stable=True)]
    lengths, starts = lists.lengths[order], lists.offsets[order]
    first = 0
    while first < len(order):
        longest = max(1, int(lengths[first]))
        stop = int(torch.searchsorted(-lengths, -0.8 * longest, right=True))  # a fifth are zeros, at most
        stop = max(stop, first + _SMALL // (longest * dim), first + 1)
        stop = min(stop, first + max(1, _BLOCK // (longest * dim)), len(order))
        within = torch.arange(longest)
        places = (starts[first:stop, None] + within).clamp_(max=len(values) - 1)
        padded = values[places].masked_fill_(within >= lengths[first:stop, None], vectors)
        yield Block(order[first:stop], padded, lengths[first:stop])
        first = stop


@dataclass(frozen=True)
class LeastSquares:
    """The least-squares problem of each list, whose solution x is the vector of the list.

    x minimizes the sum of (1 - x·v)² over the vectors v of the list, plus `unobserved_weight` times the sum of (x·v)²
    over all vectors, plus `regularization` · n · |x|², where n is the total weight of both sums.
    """

    regularization: float
    unobserved_weight: float

    def solve(self, blocks: Iterable[Block], vectors: Tensor, found: Tensor, steps: int | None) -> None:
        """Write the solution for each list into its row of `found`, shape (lists, dim).

        With `steps`, improve the vectors in `found` by this number of steps of conjugate gradients instead.
        """
        everyone = self._everyone(vectors)
        for block, gathered, ridge in self._gathered(blocks, vectors):
            if steps is None:
                found[block.rows] = _exactly(gathered, everyone, ridge, gathered.sum(1))
            else:
                found[block.rows] = _descended(gathered, everyone, ridge, found[block.rows], steps)

    def applied(self, blocks: Iterable[Block], vectors: Tensor, target: Tensor, found: Tensor) -> None:
        """Multiply the inverse of each list's matrix by a vector. The product of the result and the sum of the list's
        vectors is the score of the item with this vector.
        """
        for block, gathered, ridge in self._gathered(blocks, vectors):
            wanted = target.expand(len(gathered), -1)
            found[block.rows] = _exactly(gathered, self._everyone(vectors), ridge, wanted)

    def _everyone(self, vectors: Tensor) -> Tensor:
        return self.unobserved_weight * (vectors.T @ vectors)

    def _gathered(self, blocks: Iterable[Block], vectors: Tensor) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Blocks, their vectors, shape (lists, longest, dim), 0 where a list is shorter; and the weight of |x|²."""
        count, dim = vectors.shape
        filled = torch.cat([vectors, vectors.new_zeros(1, dim)])
        for block in blocks:
            gathered = filled.index_select(0, block.padded.flatten()).view(*block.padded.shape, dim)
            weights = block.lengths + self.unobserved_weight * count
            yield block, gathered, (self.regularization * weights)[:, None]


def _exactly(gathered: Tensor, everyone: Tensor, ridge: Tensor, wanted: Tensor) -> Tensor:
    systems = torch.baddbmm(everyone.expand(len(gathered), -1, -1), gathered.mT, gathered)
    systems.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.cholesky_solve(wanted[..., None], torch.linalg.cholesky(systems))[..., 0]


def _descended(gathered: Tensor, everyone: Tensor, ridge: Tensor, x: Tensor, steps: int) -> Tensor:
    """Return x after some steps of conjugate gradients, which build no matrix (Takács et al., RecSys 2011)."""
    across = gathered.mT
    own = torch.bmm(torch.bmm(x[:, None], across).neg_().add_(1), gathered)[:, 0]
    residual = own.addmm_(x, everyone, alpha=-1).addcmul_(ridge, x, value=-1)
    direction, size = residual, residual.square().sum(1, keepdim=True)
    for step in range(steps):
        image = torch.bmm(torch.bmm(direction[:, None], across), gathered)[:, 0]
        image.addmm_(direction, everyone).addcmul_(ridge, direction)
        length = size / (direction * image).sum(1, keepdim=True).add_(_TINY)
        x = torch.addcmul(x, length, direction)
        if step + 1 < steps:
            residual = torch.addcmul(residual, length, image, value=-1)
            before, size = size, residual.square().sum(1, keepdim=True)
            direction = torch.addcmul(residual, size / (before + _TINY), direction)
    return x

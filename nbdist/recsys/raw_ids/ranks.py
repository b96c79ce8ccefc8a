"""Look-ups in tables of raw ids whose rows are divided among ranks, and the exchange of their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .mixing import owners
from .table import RawTable


class _Route(NamedTuple):
    """The exchange of the ids of a look-up with the ranks that store their rows."""

    order: Tensor
    """The order in which the ids were sent."""
    sent: list[int]
    """The number of ids sent to each rank."""
    received: list[int]
    """The number of ids received from each rank."""


class _LookUp(NamedTuple):
    """A look-up whose gradient is not computed yet."""

    vectors: Tensor
    rows: Tensor
    """The rows on this rank that the ranks asked for, in the order of the ranks; -1 for an id without a row."""
    route: _Route | None
    marker: Tensor
    """The gradient of the table during the look-up. `zero_grad` replaces it or writes to it."""
    version: int


class SpreadLookUps:
    """Look-ups in one table whose rows are divided among ranks. All ranks must call each method.

    The gradients of a row are added in the order of the ranks and of their batches, so that the sum does not depend on
    the number of ranks.

    Args:
        group: The process group.
    """

    def __init__(self, group: Any) -> None:
        self._group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._waiting: list[_LookUp] = []

    @torch.no_grad()
    def vectors(self, table: RawTable, ids: Tensor, training: bool) -> tuple[Tensor, Tensor | None]:
        """Look up the vectors of this rank's ids, and admit new ids in training.

        Returns:
            The vectors, shape (ids, width), zeros for an id without a row; and, for a table with a row for unknown
            ids, whether each id has a row, shape (ids, 1), otherwise None.
        """
        route = None
        if self.size > 1:
            owner = owners(ids, self.size)
            order = owner.argsort(stable=True)
            route = self._route(order, owner)
            ids = self._sent(ids[order], route.sent, route.received)
        rows = table.rows_for(ids, training)
        vectors, known = table.vectors(rows), (rows >= 0)[:, None] if table.default_row is not None else None
        if route is not None:
            vectors = self._back(vectors, route)
            known = None if known is None else self._back(known.to(torch.uint8), route).bool()
        if training:
            if table.weight.grad is None:
                self._waiting.clear()  # of steps that were given up
                table.weight.grad = _sparse(rows[:0], table.weight.new_zeros(0, table.weight.shape[1]), table)
            marker = table.weight.grad
            vectors.requires_grad_()
            self._waiting.append(_LookUp(vectors, rows, route, marker, marker._version))
        return vectors, known

    @torch.no_grad()
    def exchange(self, table: RawTable) -> None:
        """Set the table's gradient to the mean over the ranks of all gradients since `zero_grad`, for the rows on this
        rank."""
        marker, looked_up = table.weight.grad, self._waiting
        self._waiting = []
        rows, grads = [], []
        for one in looked_up:
            if one.marker is not marker or one.version != marker._version:
                continue  # its gradient was given up by zero_grad
            grad = one.vectors.grad
            grad = torch.zeros_like(one.vectors) if grad is None else grad
            if one.route is not None:
                grad = self._sent(grad.index_select(0, one.route.order), one.route.sent, one.route.received)
            there = (one.rows >= 0).nonzero()[:, 0]
            known = len(there) == len(one.rows)
            rows.append(one.rows if known else one.rows[there])
            grads.append(grad if known else grad[there])
        if not rows:
            return
        found, places = torch.cat(rows).unique(return_inverse=True)
        total = table.weight.new_zeros(len(found), table.weight.shape[1])
        total.index_add_(0, places, torch.cat(grads))
        mean = _sparse(found, total / self.size, table)
        assert marker is not None
        table.weight.grad = (_sparse(marker._indices()[0], marker._values(), table) + mean) if marker._nnz() else mean

    def _route(self, order: Tensor, owner: Tensor) -> _Route:
        sent = owner.bincount(minlength=self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return _Route(order, sent.tolist(), received.tolist())

    def _sent(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send parts of a tensor to the ranks, and return the parts from them."""
        found = tensor.new_empty(sum(received), *tensor.shape[1:])
        dist.all_to_all_single(found, tensor.contiguous(), received, sent, group=self._group)
        return found

    def _back(self, tensor: Tensor, route: _Route) -> Tensor:
        """Return the answers for the ids of this rank, in the order of the ids before they were sent."""
        answers = self._sent(tensor, route.received, route.sent)
        return torch.empty_like(answers).index_copy_(0, route.order, answers)


def _sparse(rows: Tensor, grads: Tensor, table: RawTable) -> Tensor:
    """Return a sparse gradient of distinct rows in ascending order."""
    shape = table.weight.shape
    return torch.sparse_coo_tensor(rows[None], grads, shape, check_invariants=False, is_coalesced=True)

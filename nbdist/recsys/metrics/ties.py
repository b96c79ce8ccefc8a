"""The expectation of ranking metrics for rows with equal scores, over all orders of these rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ties(NamedTuple):
    """The rows of some users, ordered by score; rows with the same score form one tie.

    All attributes except `totals` have shape (ties,): the ties of a user are consecutive.
    """

    owner: Tensor
    """The number of the user: 0 to users - 1."""
    start: Tensor
    """The number of rows of the user that are ahead of the tie."""
    size: Tensor
    """The number of rows of the tie."""
    positives: Tensor
    """The number of positive rows of the tie."""
    totals: Tensor
    """The number of positive rows of each user, at least one; shape (users,)."""

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor, users: Tensor) -> Ties:
        """Sort rows. All three tensors have shape (rows,). Users without a positive row are left out."""
        _, owner = users.unique(return_inverse=True)
        totals = owner.bincount(weights=labels.double()).long()
        there = totals[owner] > 0
        scores, labels, owner = scores[there], labels[there], owner[there]
        owner, totals = (totals > 0).cumsum(0)[owner] - 1, totals[totals > 0]
        order = scores.argsort(descending=True, stable=True)
        order = order[owner[order].argsort(stable=True)]
        scores, labels, owner = scores[order], labels[order], owner[order]
        begins = torch.ones_like(owner, dtype=torch.bool)
        begins[1:] = (owner[1:] != owner[:-1]) | (scores[1:] != scores[:-1])
        number, first = begins.cumsum(0) - 1, begins.nonzero().squeeze(1)
        size, positives = number.bincount(), number.bincount(weights=labels.double()).long()
        owner = owner[first]
        ahead = size.cumsum(0) - size  # rows of all users ahead of the tie
        start = ahead - ahead[torch.searchsorted(owner, owner)]  # the start of the user's first tie
        return cls(owner, start, size, positives, totals)

    def within(self, k: int) -> Tensor:
        """Return the number of rows of each tie that are among the user's first k."""
        return (k - self.start).clamp(min=0).minimum(self.size)

    def per_user(self, values: Tensor) -> Tensor:
        """Return the sum over the ties of each user; shape (users,)."""
        return self.owner.bincount(weights=values, minlength=len(self.totals))

    def recall(self, k: int) -> Tensor:
        """Return the share of a user's positive rows among the first k."""
        return self.per_user(self.positives.double() * self.within(k) / self.size) / self.totals

    def ndcg(self, k: int) -> Tensor:
        """Return the discounted gain of a user's first k rows, as a share of the best possible gain."""
        places = int((self.start + self.size).max())
        gains = 1 / torch.arange(2, places + 2, dtype=torch.float64, device=self.size.device).log2()
        upto = torch.cat([gains.new_zeros(1), gains.cumsum(0)])  # of the first n places
        stop = self.start + self.within(k)
        found = self.positives.double() / self.size * (upto[stop] - upto[self.start.minimum(stop)])
        return self.per_user(found) / upto[self.totals.clamp(max=k)]

    def hit_rate(self, k: int) -> Tensor:
        """Return the probability that a positive row is among a user's first k."""
        first = self._first()
        return 1 - none_before(first.within(k), first.size, first.positives)

    def mrr(self, k: int) -> Tensor:
        """Return the mean reciprocal rank of a user's first positive row, 0 if it is not among the first k."""
        first = self._first()
        # The row of a tie that is the first positive one has all its negative rows ahead of it at most.
        rows = first.within(k).minimum(first.size - first.positives + 1)
        tie = torch.arange(len(rows), device=rows.device).repeat_interleave(rows)
        ahead = torch.arange(len(tie), device=rows.device) - (rows.cumsum(0) - rows)[tie]  # rows of the tie ahead of it
        start, size, positives = first.start[tie], first.size[tie], first.positives[tie]
        likely = none_before(ahead, size, positives) * positives / (size - ahead)
        per_row = likely / (start + ahead + 1)
        return per_row.new_zeros(len(rows)).index_add_(0, tie, per_row)

    def average_precision(self, k: int) -> Tensor:
        """Return the mean precision at the positions of a user's positive rows; a positive row that is not among the
        first k counts 0."""
        before = self.positives.cumsum(0) - self.positives
        before = before - before[torch.searchsorted(self.owner, self.owner)]  # positive rows ahead of the tie
        rows = self.within(k)
        tie = torch.arange(len(rows), device=rows.device).repeat_interleave(rows)
        ahead = torch.arange(len(tie), device=rows.device) - (rows.cumsum(0) - rows)[tie]  # rows of the tie ahead of it
        size, positives = self.size[tie].double(), self.positives[tie].double()
        # A row of the tie is positive with the probability positives / size; then the rows ahead of it have their share
        # of the other positive ones.
        others = ahead * (positives - 1) / (size - 1).clamp(min=1)
        precision = (before[tie] + 1 + others) / (self.start[tie] + ahead + 1)
        found = precision.new_zeros(len(rows)).index_add_(0, tie, positives / size * precision)
        return self.per_user(found) / self.totals.clamp(max=k)

    def auc(self) -> Tensor:
        """Return the AUC of a user's rows; NaN without a negative row."""
        negatives = (self.size - self.positives).double()
        total = self.per_user(negatives)
        until = negatives.cumsum(0)
        first = torch.searchsorted(self.owner, self.owner)
        until = until - (until - negatives)[first]  # of the user, to the end of the tie
        behind = total[self.owner] - until
        return self.per_user(self.positives * (behind + negatives / 2)) / (total * self.totals)

    def _first(self) -> Ties:
        """Return the first tie of each user that has a positive row."""
        some = self.positives > 0
        owner = self.owner[some]
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = owner[1:] != owner[:-1]
        start, size, positives = (values[some][first] for values in (self.start, self.size, self.positives))
        return Ties(owner[first], start, size, positives, self.totals)


def none_before(count: Tensor, size: Tensor, positives: Tensor) -> Tensor:
    """Return the probability that, with `size` rows in random order, none of the `positives` positive rows is among
    the first `count`.
    """
    negatives = (size - positives).double()
    left, size, count = (negatives - count).clamp(min=0), size.double(), count.double()
    logarithm = ((size - count + 1).lgamma() - (size + 1).lgamma()) + ((negatives + 1).lgamma() - (left + 1).lgamma())
    return torch.where(count <= negatives, logarithm.exp(), 0.0)

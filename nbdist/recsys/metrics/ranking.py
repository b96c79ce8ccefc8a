"""Metrics of ranked rows, over all ranks: how many of a user's positive rows are among the user's first k rows.

A third tensor, `indexes`, has the group of each row, such as the user. ::

    recall = Recall(10)
    for batch in loader:
        recall.update(scores, batch["taken"], batch["user"])
    print(recall.compute())
"""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch
from torch import Tensor

from .. import ranks
from .checks import check_finite, checked_labels, checked_rows, checked_weights
from .rows import OfKeptRows
from .ties import Ties


class Grouped(OfKeptRows):
    """A metric that is the mean over users of a value, which depends on the order of the user's rows.

    Rows with equal scores are counted by the expected value over all orders of these rows. Users without a positive row
    are left out of the mean; `compute` counts them, and rank 0 warns of them.

    Args:
        k: The number of a user's top rows that are evaluated. None: all.

    Raises:
        ValueError: `k` is less than 1.
    """

    kept: ClassVar = {"preds": torch.float64, "target": torch.uint8, "indexes": torch.int64, "weights": torch.float64}

    users = 0
    """The number of users in the mean of `compute`."""
    users_without_positives = 0
    """The number of users that `compute` has left out of the mean."""

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        if k is not None and (not hasattr(k, "__index__") or k < 1):
            raise ValueError(f"`k` must be an integer, at least 1, got {k!r}")
        self.k = k

    def update(self, preds: Tensor, target: Tensor, indexes: Tensor, weights: Tensor | None = None) -> None:
        """Add rows.

        Args:
            preds: Scores, one per row; the row with the highest score comes first.
            target: The label of each row: 0 or 1, or booleans.
            indexes: The user of each row: integers.
            weights: The weight of each row's user, at least 0, equal in all rows of a user. None: 1.

        Raises:
            ValueError: The tensors differ in their numbers of rows or have several columns, a score or a weight is not
                finite, a weight is below 0, a label is not 0 or 1, or users are not integers.
        """
        indexes = indexes.flatten()
        if indexes.is_floating_point() or indexes.dtype == torch.bool:
            raise ValueError(f"users must be integers, got {indexes.dtype}")
        if len(indexes) != len(preds):
            raise ValueError(f"`indexes` must have the user of each of {len(preds)} rows, got {len(indexes)} users")
        if preds.shape == indexes.shape:
            check_finite("predictions", preds, indexes)  # names the user, too
        preds, target = checked_rows(preds, target)
        labels, weights = checked_labels(target), checked_weights(weights, preds)
        self._keep(preds, labels, indexes, weights)

    def compute(self) -> Tensor:
        """Return the mean over all users of all ranks who have a positive row.

        Raises:
            ValueError: There are no rows, or none is positive; a user has two weights, or all weights are 0.
        """
        scores, labels, indexes, weights = self._columns()
        every = len(indexes.unique())
        if not labels.any():
            raise ValueError(f"{type(self).__name__}: none of {every} users has a positive row on any rank")
        ties = Ties.of(scores, labels, indexes)
        self.users = len(ties.totals)
        self.users_without_positives = every - self.users
        if self.users_without_positives and ranks.rank() == 0:
            warnings.warn(
                f"{type(self).__name__}: {self.users_without_positives} of {every} users have no positive row and are "
                "left out of the mean",
                stacklevel=3,
            )
        weights = self._user_weights(labels, indexes, weights)
        return self._mean(ties, weights, len(scores) if self.k is None else self.k)

    def _mean(self, ties: Ties, weights: Tensor, k: int) -> Tensor:
        """Return the mean over users."""
        return self._of_users(ties, k) @ (weights / weights.sum())

    def _user_weights(self, labels: Tensor, indexes: Tensor, weights: Tensor) -> Tensor:
        """Return the weight of each user with a positive row, in the order of `Ties`; shape (users,)."""
        _, owner = indexes.unique(return_inverse=True)
        found = torch.zeros(int(owner.max()) + 1, dtype=torch.float64, device=owner.device).index_put_(
            (owner,), weights
        )
        wrong = found[owner] != weights
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"{type(self).__name__}: user {indexes[row].item()} has the weights {found[owner[row]].item()} and "
                f"{weights[row].item()}: all rows of a user must have one weight"
            )
        found = found[owner.bincount(weights=labels.double()) > 0]
        if not found.any():
            raise ValueError(f"{type(self).__name__}: all users with a positive row have the weight 0")
        return found

    def _of_users(self, ties: Ties, k: int) -> Tensor:
        """Return the value of each user, shape (users,)."""
        raise NotImplementedError


class Recall(Grouped):
    """The share of a user's positive rows among the first k rows of the user; mean over users.

    Args:
        k: The number of top rows of each user that are evaluated.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import Recall
        >>> recall = Recall(1)
        >>> scores, taken = torch.tensor([0.9, 0.1, 0.4, 0.8]), torch.tensor([1, 1, 1, 0])
        >>> recall.update(scores, taken, torch.tensor([0, 0, 7, 7]))  # the users
        >>> float(recall.compute())
        0.25
    """

    def __init__(self, k: int) -> None:
        super().__init__(k)

    def _of_users(self, ties: Ties, k: int) -> Tensor:
        return ties.recall(k)


class NDCG(Grouped):
    """The discounted gain of the first k rows of each user, as a share of the best possible gain; mean over users.

    Args:
        k: The number of top rows of each user that are evaluated.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import NDCG
        >>> ndcg = NDCG(2)
        >>> ndcg.update(torch.tensor([0.9, 0.8]), torch.tensor([0, 1]), torch.tensor([3, 3]))
        >>> round(float(ndcg.compute()), 4)  # 1 / log2(3)
        0.6309
    """

    def __init__(self, k: int) -> None:
        super().__init__(k)

    def _of_users(self, ties: Ties, k: int) -> Tensor:
        return ties.ndcg(k)


class HitRate(Grouped):
    """The share of users with a positive row among their first k.

    Args:
        k: The number of top rows of each user that are evaluated.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import HitRate
        >>> hits = HitRate(1)
        >>> hits.update(torch.tensor([0.9, 0.1, 0.4, 0.8]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 7, 7]))
        >>> float(hits.compute())
        0.5
    """

    def __init__(self, k: int) -> None:
        super().__init__(k)

    def _of_users(self, ties: Ties, k: int) -> Tensor:
        return ties.hit_rate(k)


class MRR(Grouped):
    """The reciprocal rank of a user's first positive row, 0 if it is not among the first k; mean over users.

    Args:
        k: The number of top rows of each user that are evaluated. None: all.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import MRR
        >>> mrr = MRR()
        >>> mrr.update(torch.tensor([0.9, 0.1, 0.4]), torch.tensor([0, 0, 1]), torch.tensor([5, 5, 5]))
        >>> float(mrr.compute())
        0.5
    """

    def _of_users(self, ties: Ties, k: int) -> Tensor:
        return ties.mrr(k)


class MAP(Grouped):
    """The mean precision at the positions of a user's positive rows (0 for a row that is not among the first k); mean
    over users.

    Args:
        k: The number of top rows of each user that are evaluated. None: all.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import MAP
        >>> precision = MAP()
        >>> precision.update(torch.tensor([0.9, 0.5, 0.4]), torch.tensor([1, 0, 1]), torch.tensor([5, 5, 5]))
        >>> round(float(precision.compute()), 4)  # (1/1 + 2/3) / 2
        0.8333
    """

    def _of_users(self, ties: Ties, k: int) -> Tensor:
        return ties.average_precision(k)


class GAUC(Grouped):
    """The mean AUC of the rows of a user, weighted by the user's number of rows (Zhou et al., KDD 2018): it measures
    the order of the rows within each user, and not differences between users.

    Users whose rows all have the same label are left out. `users_without_positives` counts users without a positive
    row, and `users_without_negatives` the others.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import GAUC
        >>> gauc = GAUC()
        >>> gauc.update(torch.tensor([0.9, 0.1, 0.4, 0.8]), torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 7, 7]))
        >>> float(gauc.compute())
        0.5
    """

    users_without_negatives = 0
    """The number of users whose rows are all positive, which `compute` has left out."""

    def __init__(self) -> None:
        super().__init__()

    def _mean(self, ties: Ties, weights: Tensor, k: int) -> Tensor:
        values = ties.auc()
        both = ~values.isnan()
        self.users_without_negatives = int((~both).sum())
        self.users = int(both.sum())
        weights = (weights * ties.per_user(ties.size.double()))[both]
        if not weights.any():
            raise ValueError("GAUC: no user with a weight has rows of both labels on any rank")
        return values[both] @ (weights / weights.sum())

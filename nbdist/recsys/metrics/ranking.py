"""Metrics of ranked items, over all ranks: how much of what a user took is among the first k that the model names.

They are torchmetrics' own, with which rows belong together told by a third tensor: `indexes`, such as the users. ::

    recall = Recall(10)
    for batch in loader:
        recall.update(scores, batch["taken"], batch["user"])
    print(recall.compute())
"""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
from torch import Tensor
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall
from torchmetrics.retrieval.base import RetrievalMetric
from torchmetrics.utilities import dim_zero_cat

from .. import ranks
from ..loader.columns import Ragged


class _Grouped(RetrievalMetric, ABC):
    """What torchmetrics' own lack.

    A rank with fewer batches than others would have all wait for ever; and a score below 0, as logits are, would not
    count as one.
    """

    def update(self, preds: Tensor, target: Tensor, indexes: Tensor) -> None:
        """Take rows in.

        Args:
            preds: Scores, one per row, higher for what is named first.
            target: Whether the user took it: 0 or 1, or booleans.
            indexes: Whose rows they are: integers.
        """
        if len(preds):
            super().update(preds, target, indexes)

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Bring the rows of all ranks together, those of each rank in one piece."""
        for name, dtype in (("indexes", torch.int64), ("preds", torch.float32), ("target", torch.int64)):
            parts = getattr(self, name)
            empty = torch.empty(0, dtype=dtype, device=self.device)
            setattr(self, name, [dim_zero_cat([part.to(dtype) for part in parts]) if len(parts) else empty])
        super().sync(*args, **kwargs)

    def compute(self) -> Tensor:
        """The mean over all users of all ranks. Raises `ValueError` where there are no rows."""
        scores: Any = self.preds
        if not sum(map(len, scores)):
            raise ValueError(f"{type(self).__name__}: no rows on any rank since the start, or since reset()")
        self.preds = [dim_zero_cat(scores).unique(return_inverse=True)[1].double() + 1]  # their order is what counts
        try:
            return super().compute()
        finally:
            self.preds = scores


class Recall(_Grouped, RetrievalRecall):
    """Of the items that a user took, the part that is among the first k of the rows of that user; mean over users.

    Args:
        k: How many.

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
        super().__init__(top_k=k)


class NDCG(_Grouped, RetrievalNormalizedDCG):
    """Discounted gain of the first k rows of each user, as a part of the best there could be; mean over users.

    Args:
        k: How many.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import NDCG
        >>> ndcg = NDCG(2)
        >>> ndcg.update(torch.tensor([0.9, 0.8]), torch.tensor([0, 1]), torch.tensor([3, 3]))
        >>> round(float(ndcg.compute()), 4)  # 1 / log2(3)
        0.6309
    """

    def __init__(self, k: int) -> None:
        super().__init__(top_k=k)


class HitRate(_Grouped, RetrievalHitRate):
    """The part of the users who took at least one of the first k of their rows.

    Args:
        k: How many.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import HitRate
        >>> hits = HitRate(1)
        >>> hits.update(torch.tensor([0.9, 0.1, 0.4, 0.8]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 7, 7]))
        >>> float(hits.compute())
        0.5
    """

    def __init__(self, k: int) -> None:
        super().__init__(top_k=k)


class MRR(_Grouped, RetrievalMRR):
    """One by the place of the first row that the user took, 0 where it is not among the first k; mean over users.

    Args:
        k: How many. None: all.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import MRR
        >>> mrr = MRR()
        >>> mrr.update(torch.tensor([0.9, 0.1, 0.4]), torch.tensor([0, 0, 1]), torch.tensor([5, 5, 5]))
        >>> float(mrr.compute())
        0.5
    """

    def __init__(self, k: int | None = None) -> None:
        super().__init__(top_k=k)


def ranking_metrics(ranked: Tensor, relevant: Ragged, k: int | None = None) -> dict[str, float]:
    """Recall, NDCG, hit rate and MRR of the items that a model has put first for some users, over all ranks.

    With a process group, all ranks have to call it, each with users of its own, and get the same numbers.

    Args:
        ranked: Items, the best first, each once; shape (users, at least k); -1 where there is none.
        relevant: For each of the users, the items that they took.
        k: How many of the ranked items count. None: all.

    Returns:
        "recall@k", "ndcg@k", "hit_rate@k" and "mrr@k": means over the users who took something.

    Raises:
        ValueError: `ranked` and `relevant` are of different numbers of users, k is more than there are, or no user on
            any rank took anything.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.metrics import ranking_metrics
        >>> ranked = torch.tensor([[4, 8], [6, 5]])
        >>> taken = Ragged(torch.tensor([8, 5, 1]), torch.tensor([0, 1, 3]))  # 8 by the one, 5 and 1 by the other
        >>> ranking_metrics(ranked, taken)
        {'recall@2': 0.75, 'ndcg@2': 0.508..., 'hit_rate@2': 1.0, 'mrr@2': 0.5}
    """
    k = ranked.shape[1] if k is None else k
    if len(ranked) != len(relevant.lengths):
        raise ValueError(f"{len(ranked)} users with ranked items, and {len(relevant.lengths)} with relevant ones")
    if not 1 <= k <= ranked.shape[1]:
        raise ValueError(f"k={k}: 1 to {ranked.shape[1]}, as many as are ranked")
    metrics: dict[str, Any] = {
        f"recall@{k}": Recall(k),
        f"ndcg@{k}": NDCG(k),
        f"hit_rate@{k}": HitRate(k),
        f"mrr@{k}": MRR(k),
    }
    if not sum(ranks.all_gather(len(relevant.values))):
        raise ValueError("no user took anything: there is nothing to measure by")
    first = sum(ranks.all_gather(len(ranked))[: ranks.rank()])
    preds, target, users = _rows(ranked[:, :k], relevant)
    for metric in metrics.values():
        metric.to(ranked.device).update(preds, target, users + first)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def _rows(ranked: Tensor, relevant: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and users of a row for each ranked item, and for each relevant one that is not among them."""
    users, k = ranked.shape
    owner = torch.arange(users, device=ranked.device).repeat_interleave(relevant.lengths)
    found = ranked[owner] == relevant.values[:, None]  # (relevant, k)
    label = torch.zeros_like(ranked)
    label.index_put_((owner, found.int().argmax(1)), found.any(1).to(label.dtype), accumulate=True)
    missed = owner[~found.any(1)]
    place = torch.arange(k, 0, -1, dtype=torch.float32, device=ranked.device)
    there = torch.isin(torch.arange(users, device=ranked.device), owner)  # who took nothing tells nothing
    preds = torch.cat([place.expand(int(there.sum()), k).flatten(), place.new_zeros(len(missed))])
    target = torch.cat([label[there].flatten(), torch.ones_like(missed)])
    return preds, target.long(), torch.cat([there.nonzero().repeat_interleave(k), missed])

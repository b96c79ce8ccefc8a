"""Recall, NDCG, hit rate and MRR of ranked lists of items, without a score for every item."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks
from ..loader.columns import Ragged
from .checks import checked_weights


def ranking_metrics(
    ranked: Tensor, relevant: Ragged, k: int | None = None, weights: Tensor | None = None
) -> dict[str, float]:
    """Compute recall, NDCG, hit rate and MRR of ranked items for some users, over all ranks.

    With a process group, all ranks must call it, each with its own users, and get the same numbers.

    Args:
        ranked: The ranked items of each user, integers, the best first; shape (users, at least k). -1 stands for no
            item. If an item occurs twice, the first position counts.
        relevant: The items that each user took. An item that occurs twice counts once. -1 stands for an item that the
            model does not know (see `ItemIndex.places`); each -1 counts as a miss.
        k: The number of items in each list that are evaluated. None: all.
        weights: The weight of each user in the means, at least 0; shape (users,). None: 1.

    Returns:
        "recall@k", "ndcg@k", "hit_rate@k" and "mrr@k": means over the users who took at least one item. Also three
        counts: "users" who took an item, "users_without_items", who took none and are left out, and "unknown_items",
        the number of -1 in `relevant`.

    Raises:
        TypeError: `ranked` is not a tensor, or `relevant` is not a `Ragged`.
        ValueError: `ranked`, `relevant` and `weights` have different numbers of users, items are not integers, k is
            larger than the lists, a weight is below 0 or not finite, or no user with a weight above 0 took an item.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.metrics import ranking_metrics
        >>> ranked = torch.tensor([[4, 8], [6, 5]])
        >>> taken = Ragged(torch.tensor([8, 5, 1]), torch.tensor([0, 1, 3]))  # 8 by the one, 5 and 1 by the other
        >>> found = ranking_metrics(ranked, taken)
        >>> found["recall@2"], found["hit_rate@2"], found["mrr@2"], found["users"]
        (0.75, 1.0, 0.5, 2)
    """
    if not isinstance(ranked, Tensor) or not isinstance(relevant, Ragged):
        raise TypeError(
            f"ranked items must be a tensor and relevant ones a Ragged, as `ItemIndex.places` gives them, got "
            f"{type(ranked).__name__} and {type(relevant).__name__}"
        )
    if ranked.ndim != 2 or any(one.is_floating_point() or one.dtype == torch.bool for one in (ranked, relevant.values)):
        raise ValueError(
            f"ranked and relevant items must be integers, the ranked ones of shape (users, places), got {ranked.dtype} "
            f"of shape {tuple(ranked.shape)} and {relevant.values.dtype}"
        )
    k = ranked.shape[1] if k is None else k
    if len(ranked) != len(relevant.lengths):
        raise ValueError(
            f"`relevant` must have a list for each of {len(ranked)} users, got {len(relevant.lengths)} lists"
        )
    if not 1 <= k <= ranked.shape[1]:
        raise ValueError(f"`k` must be 1 to {ranked.shape[1]}, the number of ranked items, got {k}")
    relevant = Ragged(relevant.values.to(ranked.device), relevant.offsets.to(ranked.device))
    sums, there = per_user(ranked[:, :k], relevant)
    weights = checked_weights(weights, ranked).to(ranked.device)[there]
    known = int(there.sum())
    mine = [known, len(ranked) - known, int((relevant.values == -1).sum())]
    everyone = ranks.all_gather((mine, [float(each @ weights) for each in sums.values()] + [float(weights.sum())]))
    users, without, unknown = (sum(counts) for counts in zip(*(counts for counts, _ in everyone), strict=True))
    if not users:
        raise ValueError("`relevant` must have an item for at least one user, got none")
    *totals_of, weight = [sum(values) for values in zip(*(values for _, values in everyone), strict=True)]
    if not weight:
        raise ValueError("`weights` must be above 0 for at least one user with relevant items, got 0 for all")
    return {
        **{f"{name}@{k}": total / weight for name, total in zip(sums, totals_of, strict=True)},
        "users": users,
        "users_without_items": without,
        "unknown_items": unknown,
    }


def per_user(ranked: Tensor, relevant: Ragged) -> tuple[dict[str, Tensor], Tensor]:
    """Return recall, NDCG, hit rate and MRR of each user who took an item, float64, and a mask of these users."""
    k = ranked.shape[1]
    hits, totals = _hits(ranked.long(), relevant)
    there = totals > 0
    hits, totals = hits[there].double(), totals[there]
    gains = 1 / torch.arange(2, k + 2, dtype=torch.float64, device=hits.device).log2()
    found = hits.any(1).double()
    return {
        "recall": hits.sum(1) / totals,
        "ndcg": (hits @ gains) / gains.cumsum(0)[totals.clamp(max=k) - 1],
        "hit_rate": found,
        "mrr": found / (hits.argmax(1) + 1),
    }, there


def _hits(ranked: Tensor, relevant: Ragged) -> tuple[Tensor, Tensor]:
    """Return which ranked items are relevant, each item once, shape (users, k); and the number of relevant items, shape
    (users,)."""
    users, k = ranked.shape
    user = torch.arange(users, device=ranked.device)
    owners = user.repeat_interleave(relevant.lengths)
    items, number = torch.cat([ranked.flatten(), relevant.values.long()]).unique(return_inverse=True)
    # One integer for each pair of a user and an item.
    pairs = torch.cat([user.repeat_interleave(k), owners]) * len(items) + number
    known = relevant.values != -1
    taken = pairs[users * k :][known].unique()
    unknown = owners[~known].bincount(minlength=users)
    totals = taken.div(max(1, len(items)), rounding_mode="floor").bincount(minlength=users) + unknown
    places, order = pairs[: users * k].sort(stable=True)
    first = torch.ones_like(places, dtype=torch.bool)
    first[1:] = places[1:] != places[:-1]
    hits = torch.zeros_like(first)
    hits[order] = first & torch.isin(places, taken)
    return hits.view(users, k) & (ranked != -1), totals

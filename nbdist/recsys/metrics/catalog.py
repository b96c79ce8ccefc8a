"""Properties of ranked lists of items, apart from their accuracy: how many different items they show, and how rare
these items are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks


def catalog_metrics(ranked: Tensor, counts: Tensor, k: int | None = None) -> dict[str, float]:
    """Compute coverage and novelty of ranked items for some users, over all ranks.

    With a process group, all ranks must call it, each with its own users, and get the same numbers.

    Args:
        ranked: The positions of items, integers, the best first; shape (users, at least k); -1: no item.
        counts: The number of times that each item was taken, at least 0; shape (items,), the same on all ranks.
        k: The number of items in each list that are evaluated. None: all.

    Returns:
        "coverage@k": the share of all items that are in at least one list. "novelty@k": the mean over listed items of
        -log2 of the item's share of `counts`, in bits; an item that was never taken counts as taken once.

    Raises:
        TypeError: `ranked` or `counts` is no tensor.
        ValueError: Items are not integers below the number of items, counts are below 0 or all 0, k is larger than the
            lists, or no list has an item.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import catalog_metrics
        >>> catalog_metrics(torch.tensor([[0, 1], [0, -1]]), torch.tensor([2, 1, 1, 0]))
        {'coverage@2': 0.5, 'novelty@2': 1.3333333333333333}
    """
    if not isinstance(ranked, Tensor) or not isinstance(counts, Tensor):
        raise TypeError(
            f"ranked items and counts must be tensors, got {type(ranked).__name__} and {type(counts).__name__}"
        )
    if ranked.ndim != 2 or ranked.is_floating_point() or ranked.dtype == torch.bool:
        raise ValueError(
            f"ranked items must be integers of shape (users, places), got {ranked.dtype} of shape {tuple(ranked.shape)}"
        )
    k = ranked.shape[1] if k is None else k
    if not 1 <= k <= ranked.shape[1]:
        raise ValueError(f"`k` must be 1 to {ranked.shape[1]}, the number of ranked items, got {k}")
    counts = counts.detach().flatten().double().to(ranked.device)
    if not counts.isfinite().all() or (counts < 0).any() or not counts.any():
        raise ValueError("counts must be finite numbers of at least 0, and not all 0")
    listed = ranked[:, :k].flatten().long()
    listed = listed[listed != -1]
    if len(listed) and not 0 <= int(listed.min()) <= int(listed.max()) < len(counts):
        raise ValueError(
            f"ranked items must be -1 to {len(counts) - 1}, got {int(listed.min())} to {int(listed.max())}"
        )
    bits = -(counts.clamp(min=1) / counts.sum()).log2()
    everyone = ranks.all_gather((listed.unique().cpu(), len(listed), float(bits[listed].sum())))
    total = sum(number for _, number, _ in everyone)
    if not total:
        raise ValueError("no list has an item: there is nothing to measure")
    shown = torch.cat([items for items, _, _ in everyone]).unique()
    return {
        f"coverage@{k}": len(shown) / len(counts),
        f"novelty@{k}": sum(some for _, _, some in everyone) / total,
    }

"""Exact search for the items with the largest products, in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..loader.columns import Ragged

_BLOCK = 1 << 22
"""The number of scores in memory at a time."""


@torch.no_grad()
def top_k(
    queries: Tensor, items: Tensor, k: int, *, exclude: Ragged | None = None, block: int = _BLOCK
) -> tuple[Tensor, Tensor]:
    """Return for each query the k items with the largest products, in descending order. All items are scored, in
    blocks.

    Args:
        queries: The vectors of the queries, shape (queries, width).
        items: The vectors of the items, shape (items, width), on the same device. There may be no items. The products
            have the wider of the two dtypes.
        k: The number of items.
        exclude: The items that each query must not get, such as items that a user has taken, as positions in `items`;
            -1 is ignored.
        block: The number of scores in memory at a time.

    Returns:
        The scores and the positions in `items`, both of shape (queries, k). If fewer than k items are left, the score
        is -inf and the position -1.

    Raises:
        ValueError: The widths differ, k is below 1, the number of lists in `exclude` is not the number of queries, or a
            vector or product is not finite.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.retrieval import top_k
        >>> queries, items = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]])
        >>> top_k(queries, items, 2)[1]
        tensor([[0, 1],
                [2, 1]])
        >>> taken = Ragged(torch.tensor([0, 2, 1]), torch.tensor([0, 1, 3]))  # the first by one, two by the other
        >>> top_k(queries, items, 2, exclude=taken)[1]
        tensor([[ 1,  2],
                [ 0, -1]])
    """
    if queries.ndim != 2 or items.ndim != 2:
        raise ValueError(
            f"queries and items must be of shape (rows, width), got {tuple(queries.shape)} and {tuple(items.shape)}"
        )
    if queries.shape[1] != items.shape[1]:
        raise ValueError(f"queries and items must have the same width, got {queries.shape[1]} and {items.shape[1]}")
    if not all(hasattr(one, "__index__") and one >= 1 for one in (k, block)):
        raise ValueError(f"`k` and `block` must be integers, at least 1, got {k!r} and {block!r}")
    if exclude is not None and len(exclude.lengths) != len(queries):
        raise ValueError(
            f"`exclude` must have a list for each of {len(queries)} queries, got {len(exclude.lengths)} lists"
        )
    for what, vectors in (("query", queries), ("item", items)):
        # A sum that is finite is one of finite numbers, and takes a tenth of the time of a look at each row.
        if not vectors.sum().isfinite():
            _check_finite(what, vectors.isfinite().all(1))
    dtype = torch.promote_types(queries.dtype, items.dtype)
    dtype = dtype if dtype.is_floating_point else torch.float32
    queries, items = queries.to(dtype), items.to(dtype)
    scores = torch.full((len(queries), k), -torch.inf, dtype=queries.dtype, device=queries.device)
    places = torch.full((len(queries), k), -1, device=queries.device)
    width = max(1, min(len(items), max(k, block)))
    height = max(1, block // max(1, width))
    for first in range(0, len(queries), height):
        rows = slice(first, min(first + height, len(queries)))
        for start in range(0, len(items), width):
            stop = min(start + width, len(items))
            found = queries[rows] @ items[start:stop].T  # (rows, items of the block)
            if exclude is not None:
                _leave_out(found, exclude, rows, start)
            found, place = found.topk(min(k, stop - start))
            together = torch.cat([scores[rows], found], dim=1)
            scores[rows], chosen = together.topk(k)
            places[rows] = torch.cat([places[rows], place + start], dim=1).gather(1, chosen)
    _check_finite("the products of query", scores[:, 0] < torch.inf)  # NaN comes first there
    places[scores == -torch.inf] = -1
    return scores, places


def _check_finite(what: str, finite: Tensor) -> None:
    """Raise `ValueError` if one of some rows is not finite."""
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise ValueError(f"{what} {row} must be finite, got NaN or infinity ({int((~finite).sum())} such rows)")


def _leave_out(scores: Tensor, exclude: Ragged, rows: slice, start: int) -> None:
    """Set the scores of excluded items to -inf, for some queries and the items from `start` on."""
    offsets = exclude.offsets[rows.start : rows.stop + 1]
    items = exclude.values[int(offsets[0]) : int(offsets[-1])] - start
    owner = torch.arange(len(scores), device=scores.device).repeat_interleave(offsets.diff())
    here = (items >= 0) & (items < scores.shape[1])
    scores[owner[here], items[here]] = -torch.inf

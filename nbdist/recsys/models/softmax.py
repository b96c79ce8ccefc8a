"""The softmax for training retrieval models, over the items of a batch and some drawn items."""

from __future__ import annotations

import torch
from torch import Tensor

from ..loader.columns import Columns, rows_of, take


def softmax_logits(
    queries: Tensor, items: Tensor, ids: Tensor, shares: Tensor | None = None, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the score of every item for each row's query, and the index of the row's own item, for `cross_entropy`.

    The items of the other rows are negatives. They occur as often as in the training rows, so popular items would be
    penalized for their popularity. `shares` corrects this: the logarithm of an item's probability of being a candidate
    is subtracted from its logit (logQ; Yi et al., "Sampling-bias-corrected neural modeling", RecSys 2019). With
    additional negatives that are drawn uniformly (`draw_rows`), the probability covers both kinds (Yang et al., "Mixed
    negative sampling", 2020). An item is never a negative for its own row.

    A rank uses only the items of its own rows as negatives.

    Args:
        queries: The vectors of the queries, shape (rows, width).
        items: The vectors of each row's item, followed by the negatives; shape (rows + negatives, width).
        ids: The codes of the items; shape (rows,), or (rows + negatives,).
        shares: The share of each code in the training rows, as returned by `Vocabulary.shares`. None: no correction.
        temperature: The divisor of the scores.

    Returns:
        The logits, shape (rows, rows + negatives), and the index of each row's own item, shape (rows,).

    Raises:
        ValueError: The number of ids is not the number of items.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import softmax_logits
        >>> vectors = torch.eye(3)
        >>> logits, own = softmax_logits(vectors, vectors, torch.tensor([4, 5, 4]))
        >>> logits
        tensor([[1., 0., -inf],
                [0., 1., 0.],
                [-inf, 0., 1.]])
        >>> own
        tensor([0, 1, 2])
    """
    rows, candidates = len(queries), len(items)
    if len(ids) != candidates:
        raise ValueError(f"{len(ids)} ids for {candidates} items")
    logits = queries @ items.T / temperature
    if shares is not None:
        shares = shares.to(logits.device)
        known = shares > 0
        likely = rows * shares[ids].clamp(min=float(shares[known].min())) + (candidates - rows) / known.sum()
        logits = logits - (likely / candidates).log()
    own = torch.arange(rows, device=logits.device)
    same = ids[:rows, None] == ids[None, :]  # (rows, candidates)
    same[own, own] = False
    return logits.masked_fill(same, -torch.inf), own


def draw_rows(table: Columns, count: int, generator: torch.Generator | None = None) -> Columns:
    """Draw rows of a table of items uniformly, with replacement: negatives for `TwoTower.forward`.

    Args:
        table: The columns of all items, each item in one row.
        count: The number of rows.
        generator: The generator of random numbers, on the CPU. None: torch's own.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import draw_rows
        >>> movies = {"movie": torch.tensor([2, 3, 4]), "year": torch.tensor([1979, 1972, 2002])}
        >>> drawn = draw_rows(movies, 5)
        >>> drawn["movie"].shape, bool((drawn["year"][drawn["movie"] == 3] == 1972).all())
        (torch.Size([5]), True)
    """
    rows = torch.randint(rows_of(next(iter(table.values()))), (count,), generator=generator)
    return {name: take(column, rows) for name, column in table.items()}

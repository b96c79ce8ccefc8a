"""The softmax for training retrieval models, over the items of a batch and some drawn items, or the hardest of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import check_count, check_number
from .. import ranks
from ..loader.columns import Columns, Ragged, rows_of, take


def softmax_logits(
    queries: Tensor,
    items: Tensor,
    ids: Tensor,
    shares: Tensor | None = None,
    *,
    drawn: Tensor | None = None,
    exclude: Ragged | None = None,
    temperature: float = 1.0,
    across_ranks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the score of every item for each row's query, and the index of the row's own item, for `cross_entropy`.

    The items of the other rows are negatives. They occur as often as in the training rows, so popular items would be
    penalized for their popularity. `shares` corrects this: the logarithm of an item's probability of being a candidate
    is subtracted from its logit (logQ; Yi et al., "Sampling-bias-corrected neural modeling", RecSys 2019). With
    additional negatives that are drawn (`draw_rows`), the probability covers both kinds (Yang et al., "Mixed negative
    sampling", 2020). An item is never a negative for its own row. `hard_negatives` keeps the hardest negatives.

    Args:
        queries: The vectors of the queries, shape (rows, width).
        items: The vectors of each row's item, followed by the negatives; shape (rows + negatives, width).
        ids: The codes of the items; shape (rows,), or (rows + negatives,).
        shares: The share of each code in the training rows, as returned by `Vocabulary.shares`. None: no correction.
        drawn: The weight of each code in the draw of the negatives, shape (codes,), such as ``shares**0.75``. None:
            negatives are drawn uniformly from the codes with a share.
        exclude: The codes of items that are no negatives for a row, a list for each row, such as all items that the
            row's user has taken. None: only the row's own item.
        temperature: The divisor of the scores.
        across_ranks: Whether items and negatives of the other ranks are negatives, too. All ranks must call the
            function then, in each step. False: a rank uses only its own.

    Returns:
        The logits, shape (rows, rows + negatives), and the index of each row's own item, shape (rows,). With
        `across_ranks`, the logits have a column for each item of all ranks.

    Raises:
        ValueError: The number of ids is not the number of items, `exclude` does not have a list for each row, or
            `drawn` is given without `shares`.

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
    if drawn is not None and shares is None:
        raise ValueError("`shares` must be given with `drawn`, got None: both correct for how likely an item is")
    if exclude is not None and rows_of(exclude) != rows:
        raise ValueError(f"`exclude` must have a list for each of {rows} rows, got {rows_of(exclude)} lists")
    own, taken = torch.arange(rows, device=items.device), rows
    if across_ranks and ranks.world_size() > 1:
        counts = _all_counts(items.new_tensor([rows, candidates], dtype=torch.int64))
        every = [each for _, each in counts]
        items, ids = (_FromAllRanks.apply(one, every) for one in (items, ids))  # type: ignore[no-untyped-call]
        own, taken, candidates = own + sum(every[: ranks.rank()]), sum(some for some, _ in counts), len(ids)
    logits = queries @ items.T / temperature
    if shares is not None:
        shares = shares.to(logits.device)
        known = shares > 0
        chance = 1 / known.sum() if drawn is None else (drawn / drawn.sum()).to(shares)[ids]
        likely = taken * shares[ids].clamp(min=float(shares[known].min())) + (candidates - taken) * chance
        logits = logits - (likely / candidates).log()
    same = ids[own, None] == ids[None, :]  # (rows, candidates)
    if exclude is not None:
        same |= in_lists(ids, exclude)
    same[torch.arange(rows, device=own.device), own] = False
    return logits.masked_fill(same, -torch.inf), own


def in_lists(ids: Tensor, lists: Ragged) -> Tensor:
    """Return whether each id is in the list of each row, shape (rows, ids)."""
    known, place = ids.unique(return_inverse=True)
    rows = torch.repeat_interleave(lists.lengths)  # the row of each element
    values = lists.values.to(known)
    at = torch.searchsorted(known, values).clamp(max=len(known) - 1)
    there = known[at] == values
    found: Tensor = known.new_zeros(rows_of(lists), len(known), dtype=torch.bool)
    found[rows[there], at[there]] = True
    return found[:, place]


def hard_negatives(logits: Tensor, own: Tensor, count: int, *, margin: float | None = None) -> tuple[Tensor, Tensor]:
    """Keep, for each row, the logit of its own item and the largest logits of other items: the model's hardest
    negatives.

    The function takes what `softmax_logits`, or the `forward` of `SASRec` and `HSTU`, returns, and its result goes to
    the loss instead. Logits that `shares` has corrected stay so, and it is they that are compared: a popular item is
    not harder for its popularity. An item that is no negative for a row, with a logit of -inf, is never mined. The
    hardest negatives may be items that the user would take: exclude those that are known (`softmax_logits(exclude=)`),
    and keep a distance from the others by `margin` (Moreira et al., "NV-Retriever", 2024).

    Args:
        logits: The logits, shape (rows, candidates).
        own: The index of each row's own item, shape (rows,).
        count: The largest number of negatives of a row, at least 1. If there are fewer, all are kept.
        margin: The smallest distance of a negative's logit below the own item's. 0.0: no negatives that the model
            ranks above the own item (semi-hard; Schroff et al., "FaceNet", 2015, section 3.2). None: all negatives.

    Returns:
        The logits, shape (rows, 1 + count), or with fewer columns if there are fewer candidates, with the own item in
        column 0 and then the negatives, the hardest first, and -inf where a row has no more; and the index of the own
        item, zeros, shape (rows,).

    Raises:
        TypeError, ValueError: `count` or `margin` is out of range, or the shapes do not fit each other.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import hard_negatives
        >>> logits, own = torch.tensor([[2.0, 5.0, 1.0, 0.5], [0.0, 3.0, -1.0, -torch.inf]]), torch.tensor([0, 1])
        >>> hard_negatives(logits, own, 2)
        (tensor([[ 2.,  5.,  1.],
                [ 3.,  0., -1.]]), tensor([0, 0]))
        >>> hard_negatives(logits, own, 2, margin=0.0)[0]
        tensor([[ 2.0000,  1.0000,  0.5000],
                [ 3.0000,  0.0000, -1.0000]])
    """
    check_count(count, least=1, name="`count`")
    if margin is not None:
        check_number(margin, name="`margin`")
    if logits.ndim != 2 or own.shape != logits.shape[:1]:
        raise ValueError(
            "`logits` must be of shape (rows, candidates) and `own` of shape (rows,), got "
            f"{tuple(logits.shape)} and {tuple(own.shape)}"
        )
    right = logits.gather(1, own[:, None])
    others = logits.scatter(1, own[:, None], -torch.inf)
    if margin is not None:
        others = others.masked_fill(others > right - margin, -torch.inf)
    hardest = others.topk(min(count, max(logits.shape[1] - 1, 0)), dim=1).values
    return torch.cat([right, hardest], dim=1), torch.zeros_like(own)


def _all_counts(counts: Tensor) -> list[list[int]]:
    """Return the counts of all ranks, in order."""
    everyone = [torch.empty_like(counts) for _ in range(ranks.world_size())]
    dist.all_gather(everyone, counts)
    return torch.stack(everyone).tolist()


class _FromAllRanks(torch.autograd.Function):
    """The rows of all ranks, rank after rank. The gradient of a row is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded)
        return torch.cat([one[:count] for one, count in zip(everyone, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        first = sum(ctx.counts[: ranks.rank()])
        return gradient[first : first + ctx.counts[ranks.rank()]], None


def draw_rows(
    table: Columns, count: int, generator: torch.Generator | None = None, *, weights: Tensor | None = None
) -> Columns:
    """Draw rows of a table of items, with replacement: negatives for `TwoTower.forward`.

    Args:
        table: The columns of all items, each item in one row.
        count: The number of rows.
        generator: The generator of random numbers, on the CPU. None: torch's own.
        weights: The weight of each row, at least 0, such as popularity to the power of 0.75 (Mikolov et al.,
            "Distributed representations of words and phrases", 2013). None: all rows are equally likely.

    Raises:
        TypeError, ValueError: `count` is out of its range, or there are no rows; the number of weights is not the
            number of rows, one is below 0 or not finite, or none is above 0.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import draw_rows
        >>> movies = {"movie": torch.tensor([2, 3, 4]), "year": torch.tensor([1979, 1972, 2002])}
        >>> drawn = draw_rows(movies, 5)
        >>> drawn["movie"].shape, bool((drawn["year"][drawn["movie"] == 3] == 1972).all())
        (torch.Size([5]), True)
        >>> draw_rows(movies, 5, weights=torch.tensor([0.0, 1.0, 0.0]))["movie"]
        tensor([3, 3, 3, 3, 3])
    """
    check_count(count, least=0, name="`count`")
    there = rows_of(next(iter(table.values()))) if table else 0
    if not there:
        raise ValueError("`table` must have rows to draw, got none")
    if weights is None:
        rows = torch.randint(there, (count,), generator=generator)
    elif weights.shape != (there,):
        raise ValueError(f"`weights` must have the shape ({there},), one for each row, got {tuple(weights.shape)}")
    elif not bool((weights >= 0).all() and weights.isfinite().all() and weights.any()):
        raise ValueError("`weights` must be finite numbers of at least 0, and one of them above 0")
    else:
        ends = weights.cpu().double().cumsum(0)  # any number of rows; `multinomial` takes 2**24
        chosen = torch.rand(count, generator=generator, dtype=torch.float64) * ends[-1]
        rows = torch.searchsorted(ends, chosen, right=True).clamp(max=there - 1)
    return {name: take(column, rows) for name, column in table.items()}

"""The search for the items with the highest scores, for a part of the lists at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import polars as pl
import torch
from torch import Tensor

from ...checks import check_count
from ..loader.columns import Ragged
from ..retrieval.index import frame_of_best
from .interactions import part_of, rows_of_values

_BLOCK = 1 << 23
"""Scores that are in memory at a time."""


def best_of(
    items: pl.Series, lists: Ragged, k: int, excluded: Ragged | None, scores_of: Callable[[Ragged], Tensor]
) -> pl.DataFrame:
    """Return a row for each list of codes: `items`, the ids with the highest scores, and `scores`. Items in `excluded`
    are left out.
    """
    check_count(k, least=1, name="`k`")
    tables = []
    for rows in blocks(len(lists.lengths), max(1, _BLOCK // len(items))):
        scores = scores_of(part_of(lists, rows))
        if excluded is not None:
            part = part_of(excluded, rows)
            scores[rows_of_values(part), part.values] = -torch.inf
        best, places = _first(scores, min(k, len(items)))
        places[best == -torch.inf] = -1
        tables.append(frame_of_best(items, best, places))
    kinds = {"items": pl.List(items.dtype), "scores": pl.List(pl.Float32)}
    return pl.concat([pl.DataFrame(schema=kinds), *tables])


def _first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of each row, and their columns. Of equal scores, the first column is taken."""
    best, places = scores.topk(k)
    # topk chooses among equal scores as it likes. So all that are above the last one, and then the first of its equals.
    tied = (scores == best[:, -1:]).sum(1) > (best == best[:, -1:]).sum(1)
    for row in tied.nonzero().flatten().tolist():
        order = scores[row].argsort(descending=True, stable=True)[:k]
        best[row], places[row] = scores[row, order], order
    order = torch.argsort(places, dim=1, stable=True)
    best, places = best.gather(1, order), places.gather(1, order)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)


def blocks(rows: int, height: int) -> Iterator[Tensor]:
    """Numbers of rows, `height` at a time."""
    for first in range(0, rows, height):
        yield torch.arange(first, min(rows, first + height))

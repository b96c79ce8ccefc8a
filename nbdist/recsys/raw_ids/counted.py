"""A map from ids to rows, with the number of occurrences of each id and the batch of its last one."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import shown
from .id_map import IdMap
from .options import Score


class CountedIds:
    """A map from ids to rows that counts how often ids occur.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.map = IdMap(device)
        self._counts = torch.zeros(self.map.allocated, dtype=torch.int64, device=device)
        self._last = torch.zeros_like(self._counts)

    def add(self, ids: Tensor, counts: Tensor, last: Tensor | int) -> Tensor:
        """Add ids, which must be distinct and new, and return their rows, shape (n,)."""
        rows = self.map.add(ids)
        self._counts, self._last = (grown(one, self.map.allocated) for one in (self._counts, self._last))
        self._counts[rows], self._last[rows] = counts, last
        return rows

    def note(self, rows: Tensor, batch: int) -> None:
        """Count one occurrence in a batch for each element of `rows`, which may contain a row several times."""
        self._counts.index_add_(0, rows, torch.ones_like(rows))
        self._last.index_fill_(0, rows, batch)

    def counts(self, rows: Tensor) -> Tensor:
        """Return the number of occurrences of the id of each row."""
        return self._counts[rows]

    def last(self, rows: Tensor) -> Tensor:
        """Return the number of the batch in which the id of each row last occurred."""
        return self._last[rows]

    def expired(self, before: int) -> Tensor:
        """Return the rows whose ids did not occur in this batch or later."""
        rows = self.map.rows()
        return rows[self._last[rows] < before]

    def first_to_go(self, count: int, evict: str | Score, batch: int) -> tuple[Tensor, Tensor]:
        """Return the rows to evict, and their sort keys, float64, shape (n, 2). Rows with the smallest keys are evicted
        first.

        Args:
            count: The number of rows to evict. If there are fewer rows, all are returned.
            evict: See `RawIds`.
            batch: The number of this batch.
        """
        rows = self.map.rows()
        last = self._last[rows]
        if callable(evict):
            scores = evict(self._counts[rows], batch - last)
            if not isinstance(scores, Tensor) or scores.shape != rows.shape or scores.isnan().any():
                raise ValueError(f"`evict` must return a number for each of {len(rows)} ids, got {shown(scores)}")
            first = scores.double()
        else:
            first = (self._counts[rows] if evict == "lfu" else last).double()
        if count < len(rows):  # sort but those that may be among them
            near = (first <= first.kthvalue(count).values).nonzero()[:, 0]
            rows, last, first = rows[near], last[near], first[near]
        keys = torch.stack([first, last.double()], 1)
        order = lowest(keys, self.map.ids_of(rows), count)
        return rows[order], keys[order]

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.map.to(device)
        self._counts, self._last = self._counts.to(device), self._last.to(device)


def lowest(keys: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` smallest rows of `keys`, shape (n, 2); ids decide between equal rows."""
    order = ids.argsort()
    for column in (keys[:, 1], keys[:, 0]):
        order = order[column[order].argsort(stable=True)]
    return order[:count]


def grown(tensor: Tensor, rows: int, value: float = 0) -> Tensor:
    """Return a tensor with at least `rows` rows. Rows that are added are filled with `value`."""
    if len(tensor) >= rows:
        return tensor
    return torch.cat([tensor, tensor.new_full((rows - len(tensor), *tensor.shape[1:]), value)])

"""A map from 64-bit ids to numbers of rows, in torch tensors on any device: a hash table of buckets.

An id is stored in its bucket, which has eight places, or, if its bucket is full, in the next bucket with a free place.
All 64 bits are compared, so that two ids never share a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mixing import mixed

_WIDTH = 8
"""The number of places of a bucket: their ids fill one line of a processor's cache."""
_FULL = 5
"""The average number of ids in a bucket above which the number of buckets is doubled."""
_LEAST = 64
"""The number of rows, and of buckets, of an empty map."""


class IdMap:
    """A map from ids to the numbers of their rows, which are at least 0 and below `allocated`.

    Numbers of rows that are removed are used again.

    Args:
        device: The device of the tensors.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.raw_ids.id_map import IdMap
        >>> ids = IdMap()
        >>> ids.add(torch.tensor([2**62, -5])).tolist()
        [0, 1]
        >>> ids.find(torch.tensor([-5, 6, -5])).tolist()
        [1, -1, 1]
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.size = 0
        """The number of ids."""
        self._keys = torch.zeros(_LEAST, dtype=torch.int64, device=device)  # of each row
        self._used = torch.zeros(_LEAST, dtype=torch.bool, device=device)
        self._free = torch.arange(_LEAST - 1, -1, -1, device=device)  # the first of them are free, the last one is next
        self._make_buckets(_LEAST)

    @property
    def allocated(self) -> int:
        """The number of rows that have memory. It grows with the map."""
        return len(self._keys)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._keys.device

    @property
    def bytes(self) -> int:
        """The bytes of memory of the map."""
        parts = (self._keys, self._used, self._free, self._buckets, self._passed)
        return sum(part.numel() * part.element_size() for part in parts)

    def find(self, ids: Tensor) -> Tensor:
        """Return the row of each id, int64, shape (n,); -1 where there is none.

        Args:
            ids: Int64, shape (n,).
        """
        bucket = mixed(ids) & self._last
        found = self._rows_in(bucket, ids)
        rest = (found < 0).nonzero()[:, 0]
        bucket = bucket[rest]
        passed = self._passed[bucket]
        rest, bucket = rest[passed], bucket[passed]
        while len(rest):
            bucket = (bucket + 1) & self._last
            rows = found[rest] = self._rows_in(bucket, ids[rest])
            more = (rows < 0) & self._passed[bucket]
            rest, bucket = rest[more], bucket[more]
        return found

    def add(self, ids: Tensor) -> Tensor:
        """Give each id a row, and return the rows, int64, shape (n,).

        Args:
            ids: Int64, shape (n,): distinct ids that are not in the map.
        """
        count = len(ids)
        while self.size + count > self.allocated:
            self._grow()
        free = self.allocated - self.size
        rows = self._free[free - count : free].flip(0)
        self._keys[rows], self._used[rows] = ids, True
        self.size += count
        if self.size > _FULL * len(self._buckets):
            self._rebuild()
        else:
            self._place(ids, rows)
        return rows

    def remove(self, rows: Tensor) -> None:
        """Remove the ids of rows.

        Args:
            rows: Int64, shape (n,): distinct rows, each of an id in the map.
        """
        ids = self._keys[rows]
        bucket, rest = mixed(ids) & self._last, torch.arange(len(rows), device=rows.device)
        while len(rest):
            here = self._buckets[bucket, _WIDTH:] == rows[rest, None]
            there = here.any(1)
            self._buckets[bucket[there], _WIDTH + here[there].int().argmax(1)] = -1
            rest, bucket = rest[~there], (bucket[~there] + 1) & self._last
        free = self.allocated - self.size
        self._free[free : free + len(rows)] = rows
        self._used[rows] = False
        self.size -= len(rows)
        self._removed += len(rows)
        if self._removed > _FULL * len(self._buckets):  # buckets that were full once still send others on
            self._rebuild()

    def rows(self) -> Tensor:
        """Return the rows of all ids, in ascending order."""
        return self._used.nonzero()[:, 0]

    def ids_of(self, rows: Tensor) -> Tensor:
        """Return the ids of rows."""
        return self._keys[rows]

    def to(self, device: torch.device | str) -> None:
        """Move the map to a device."""
        for name in ("_keys", "_used", "_free", "_buckets", "_passed"):
            setattr(self, name, getattr(self, name).to(device))

    def _rows_in(self, bucket: Tensor, ids: Tensor) -> Tensor:
        """Return the row of each id that is in its bucket, and -1 for other ids."""
        block = self._buckets.index_select(0, bucket)
        return block[:, _WIDTH:].masked_fill_(block[:, :_WIDTH] != ids[:, None], -1).amax(1)

    def _place(self, ids: Tensor, rows: Tensor) -> None:
        """Put ids into their buckets, or the next ones with a free place."""
        bucket = mixed(ids) & self._last
        while len(ids):
            bucket, order = bucket.sort(stable=True)
            ids, rows = ids[order], rows[order]
            numbers = torch.arange(len(ids), device=ids.device)
            begins = torch.ones_like(bucket, dtype=torch.bool)
            begins[1:] = bucket[1:] != bucket[:-1]
            place = numbers - torch.where(begins, numbers, 0).cummax(0).values  # among the new ids of its bucket
            free = self._buckets[bucket, _WIDTH:] < 0
            chosen = free & (free.cumsum(1) == place[:, None] + 1)
            fits = chosen.any(1)
            at, slot = bucket[fits], chosen[fits].int().argmax(1)
            self._buckets[at, slot], self._buckets[at, _WIDTH + slot] = ids[fits], rows[fits]
            full = bucket[~fits]
            self._passed[full] = True
            ids, rows, bucket = ids[~fits], rows[~fits], (full + 1) & self._last

    def _grow(self) -> None:
        """Allocate memory for 50 % more rows."""
        more = self.allocated // 2
        new = torch.arange(self.allocated + more - 1, self.allocated - 1, -1, device=self.device)
        free = self._free[: self.allocated - self.size]
        self._free = torch.cat([new, free, new.new_zeros(self.size)])
        self._keys = torch.cat([self._keys, self._keys.new_zeros(more)])
        self._used = torch.cat([self._used, self._used.new_zeros(more)])

    def _rebuild(self) -> None:
        """Put all ids into new buckets. Their number is chosen for the number of ids."""
        count = len(self._buckets)
        while self.size > _FULL * count:
            count *= 2
        self._make_buckets(count)
        rows = self.rows()
        self._place(self._keys[rows], rows)

    def _make_buckets(self, count: int) -> None:
        # The ids of a bucket, and their rows; -1 is the row of a free place.
        self._buckets = torch.full((count, 2 * _WIDTH), -1, dtype=torch.int64, device=self.device)
        self._passed = torch.zeros(count, dtype=torch.bool, device=self.device)  # whether it has sent an id on
        self._last, self._removed = count - 1, 0

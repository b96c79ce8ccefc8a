"""The options of a table of raw ids: which ids get a row, and which ids are evicted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from ...checks import check_count, check_number

Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Counts of occurrences, and batches since the last one, of some ids, int64, shape (n,) both → a number for each, shape
(n,): ids with the smallest are evicted first."""


@dataclass(frozen=True)
class RawIds:
    """The options of a table of raw ids, 64-bit integers. Models take it in place of the number of codes of a column.

    The table has a row for each admitted id, and grows during training. Two ids never share a row. Strings must be
    hashed to 64-bit integers first.

    Raises:
        TypeError, ValueError: An option is out of its range, or both `capacity` and `capacity_bytes` are given.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.models import PooledTables
        >>> from nbdist.recsys.raw_ids import RawIds
        >>> from nbdist.recsys.sharding import replicate
        >>> def train():
        ...     tables = replicate(PooledTables({"user": RawIds(admit_after=2)}, embedding_dim=4), "adagrad", lr=0.1)
        ...     for users in ([5, 2**40], [2**40, 7]):
        ...         tables.optimizer.zero_grad()
        ...         tables.model({"user": torch.tensor(users)}).sum().backward()
        ...         tables.optimizer.step()
        ...     return tables.gather()
        >>> tables = in_ddp(1, train)
        >>> tables.embedding_bags["user"].ids()
        tensor([1099511627776])
    """

    capacity: int | None = None
    """The largest number of rows after a step, on all ranks together. None: no limit. When it is exceeded, a 32nd of
    the rows is evicted at once."""
    capacity_bytes: int | None = None
    """The same limit in bytes of weights, the optimizer's state, and the map of ids."""
    admit_after: int = 1
    """The number of occurrences after which an id gets a row. The batch of the last of them already uses the row."""
    admit_probability: float = 1.0
    """The probability that an id gets a row at an occurrence, from occurrence number `admit_after` on. The draw is
    computed from the id and the number of the batch, so it is the same on any number of ranks."""
    evict: Literal["lru", "lfu"] | Score = "lru"
    """The rule for which rows are evicted first: "lru", ids whose last occurrence is the longest ago; "lfu", ids that
    occurred the least often; or a function of counts and ages. Of equal ids, the one seen the longest ago is first."""
    time_to_live: int | None = None
    """The number of batches without an occurrence after which an id is evicted. The table is searched for such ids
    eight times in this number of batches."""
    unknown: Literal["zeros", "learned"] = "zeros"
    """The vector of ids without a row: "zeros", or "learned": one vector for all of them, which is trained."""
    bound: float = 0.01
    """The bound of the elements of a new row, which are uniform from -bound to bound and computed from the id."""
    folder: str | os.PathLike[str] | None = None
    """A folder on each rank's own SSD, for a table larger than memory: rows and their optimizer's state are in files
    there, and the operating system keeps those used last in free memory. The map of ids stays in memory, some 80 bytes
    for a row. Only for CPU ranks. None: all is in memory."""

    def __post_init__(self) -> None:
        for name in ("capacity", "capacity_bytes", "admit_after", "time_to_live"):
            value = getattr(self, name)
            if value is not None or name == "admit_after":
                check_count(value, least=1, name=f"`{name}`")
        if self.capacity is not None and self.capacity_bytes is not None:
            raise ValueError("`capacity_bytes` must be None with `capacity`: give one of the two")
        check_number(self.admit_probability, above=0, name="`admit_probability`")
        if self.admit_probability > 1:
            raise ValueError(f"`admit_probability` must be above 0 and at most 1, got {self.admit_probability!r}")
        if not callable(self.evict) and self.evict not in ("lru", "lfu"):
            raise ValueError(f'`evict` must be "lru", "lfu" or a function, got {self.evict!r}')
        if self.unknown not in ("zeros", "learned"):
            raise ValueError(f'`unknown` must be "zeros" or "learned", got {self.unknown!r}')
        check_number(self.bound, name="`bound`")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise TypeError(f"`folder` must be a path or None, got {self.folder!r}")

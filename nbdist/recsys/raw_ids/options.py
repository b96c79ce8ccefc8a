"""The options of a table of raw ids: which ids get a row, and which lose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Counts of occurrences, and batches since the last one, of some ids, int64, shape (n,) both → a number for each, shape
(n,): ids with the smallest are evicted first."""


@dataclass(frozen=True)
class RawIds:
    """A column of raw ids, 64-bit integers, in place of the number of codes of a column.

    Its table has a row for each admitted id, and grows in training. Two ids never share a row. Columns of strings are
    made 64-bit integers before.

    Raises:
        ValueError: An option makes no sense.

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
    """Rows on all ranks together that are left after a step, at most. None: no limit. When there are more, a 32nd of
    them is evicted at once."""
    capacity_bytes: int | None = None
    """The same in bytes of weights, the optimizer's state, and the map of ids."""
    admit_after: int = 1
    """Occurrences after which an id has a row, from the batch of the last of them on."""
    admit_probability: float = 1.0
    """Chance of an id to get a row each time that it occurs, from `admit_after` on. It follows from the id and the
    number of the batch, so that it is the same on any number of ranks."""
    evict: Literal["lru", "lfu"] | Score = "lru"
    """The rows that are evicted first: ids that occurred the longest ago, the least often, or a function's choice.
    Of equals, the one that occurred the longest ago."""
    time_to_live: int | None = None
    """Batches after which an id that did not occur is evicted; they are looked for eight times in that time."""
    unknown: Literal["zeros", "learned"] = "zeros"
    """The vector of ids without a row: zeros, or a row of its own for all of them, which is trained."""
    bound: float = 0.01
    """Numbers of a new row are from -bound to bound, uniformly, and follow from the id."""

    def __post_init__(self) -> None:
        for name in ("capacity", "capacity_bytes", "admit_after", "time_to_live"):
            value = getattr(self, name)
            optional = value is None and name != "admit_after"
            if not optional and (isinstance(value, bool) or not hasattr(value, "__index__") or value < 1):
                raise ValueError(f"`{name}` must be an integer, at least 1, got {value!r}")
        if self.capacity is not None and self.capacity_bytes is not None:
            raise ValueError("give `capacity` or `capacity_bytes`, one of the two")
        if not 0 < self.admit_probability <= 1:
            raise ValueError(f"`admit_probability` must be above 0 and at most 1, got {self.admit_probability!r}")
        if not callable(self.evict) and self.evict not in ("lru", "lfu"):
            raise ValueError(f'`evict` must be "lru", "lfu" or a function, got {self.evict!r}')
        if self.unknown not in ("zeros", "learned"):
            raise ValueError(f'`unknown` must be "zeros" or "learned", got {self.unknown!r}')
        if not 0 <= self.bound < float("inf"):
            raise ValueError(f"`bound` must be a number, at least 0, got {self.bound!r}")

"""Embedding tables for columns of codes: torch's own modules, in collections that `shard` can shard.

The collections hold and describe their tables under the names of TorchRec's `EmbeddingBagCollection` and
`EmbeddingCollection`: so a checkpoint of a model fits it with and without TorchRec.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...checks import check_count, check_mapping, shown
from ..loader.columns import Column, Columns, Ragged, ids_of
from ..raw_ids import RawIds, RawTable

_TAKEN = frozenset(dir(nn.ModuleDict()))


@dataclass(frozen=True)
class Table:
    """An embedding table, described by TorchRec's names."""

    name: str
    num_embeddings: int
    """The number of rows. For a table of raw ids, which grows: the largest number of rows, or 0 for no limit."""
    embedding_dim: int
    feature_names: list[str]
    """The columns whose codes are looked up in the table."""
    init_fn: Callable[[Tensor], Any]
    """A function that initializes a part of the table, shape (rows, embedding_dim), in place."""


Cardinality: TypeAlias = int | RawIds
"""The number of codes of a column, or the options of its raw ids."""


def check_cardinalities(cardinalities: Any) -> None:
    """Raise `TypeError` or `ValueError` unless each column has a number of codes, or a `RawIds`."""
    check_mapping(cardinalities, name="`cardinalities`", of="columns to their numbers of codes")
    for name, size in cardinalities.items():
        if isinstance(size, RawIds):
            continue
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"`cardinalities[{name!r}]` must be the number of codes, or a RawIds(), got {shown(size)}")
        check_count(size, least=1, name=f"`cardinalities[{name!r}]`")


def describe(
    cardinalities: Mapping[str, Cardinality], embedding_dim: int, init: Callable[[Tensor], Any] | None
) -> list[Table]:
    """Return a table for each column."""
    check_cardinalities(cardinalities)
    check_count(embedding_dim, least=1, name="`embedding_dim`")
    for name in cardinalities:
        if not name or "." in name or name in _TAKEN:
            raise ValueError(f"no table can have the name {name!r}, which torch uses itself: rename the column")
    found = []
    for name, size in cardinalities.items():
        if isinstance(size, RawIds):
            if init is not None:
                raise ValueError(f"`init` must be None where a column has raw ids, as {name!r} has: RawIds has `bound`")
            rows = functools.partial(nn.init.uniform_, a=-size.bound, b=size.bound)
            found.append(Table(name, size.capacity or 0, embedding_dim, [name], rows))
            continue
        bound = math.sqrt(1 / size)
        fill = init or functools.partial(nn.init.uniform_, a=-bound, b=bound)
        found.append(Table(name, size, embedding_dim, [name], fill))
    return found


class PooledTables(nn.Module):
    """A collection with a table for each column of codes, named like the column. Each row of a batch gets one vector
    per column; the vectors of a list are pooled.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`, whose table gains and loses rows during training.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        mode: The pooling of a list's vectors: "mean" or "sum". An empty list gives zeros.
        init: A function that initializes a part of a table, shape (rows, embedding_dim), in place. None: uniform
            numbers, up to the inverse square root of the number of codes.
        device: The device of the tables: "meta" if they will be sharded because they are too large for one rank.

    Raises:
        ValueError: A number of codes or `embedding_dim` is less than 1, or a name of a column cannot be the name of a
            torch module; in a batch, ids are no integers.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.models import PooledTables
        >>> tables = PooledTables({"user": 10, "genres": 5}, embedding_dim=4)
        >>> genres = Ragged(torch.tensor([2, 3, 4]), torch.tensor([0, 3, 3]))  # [2, 3, 4] and []
        >>> tables({"user": torch.tensor([2, 7]), "genres": genres}).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        *,
        embedding_dim: int = 64,
        mode: str = "mean",
        init: Callable[[Tensor], Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if mode not in ("mean", "sum"):
            raise ValueError(f"`mode` must be 'mean' or 'sum', got {mode!r}")
        self.mode, self.tables = mode, describe(cardinalities, embedding_dim, init)
        self._raw = {name for name, size in cardinalities.items() if isinstance(size, RawIds)}
        self.embedding_bags = nn.ModuleDict(
            {
                name: RawTable(embedding_dim, size, device)
                if isinstance(size, RawIds)
                else nn.EmbeddingBag(size, embedding_dim, mode=mode, include_last_offset=True, device=device)
                for name, size in cardinalities.items()
            }
        )
        _fill(self.embedding_bags, self.tables)

    def embedding_bag_configs(self) -> list[Table]:
        """The tables, in order."""
        return self.tables

    def forward(self, batch: Columns) -> Tensor:
        """Return the vectors of a batch, shape (rows, width of all tables). Other columns of the batch are ignored."""
        found: list[Tensor] = []
        bag: Any
        for name, bag in self.embedding_bags.items():
            ids = ids_of(batch, name)
            if name in self._raw:
                found.append(self._pooled(bag, ids))
            elif isinstance(ids, Ragged):
                values = _index(ids.values, name)
                found.append(bag(values, ids.offsets.to(values.dtype)))
            else:  # one per row needs no pooling
                found.append(nn.functional.embedding(_index(ids, name), bag.weight))
        return torch.cat(found, dim=1)

    def _pooled(self, table: nn.Module, ids: Column) -> Tensor:
        """Return a vector for each row of a column of raw ids."""
        if not isinstance(ids, Ragged):
            return table(ids)  # type: ignore[no-any-return]
        places = torch.arange(ids.values.shape[0], device=ids.offsets.device)
        return nn.functional.embedding_bag(
            places, table(ids.values), ids.offsets, mode=self.mode, include_last_offset=True
        )


class SequenceTables(nn.Module):
    """A collection with a table for each column of lists of codes, named like the column. Each code gets a vector.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`, whose table gains and loses rows during training.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        init: See `PooledTables`.
        device: See `PooledTables`.

    Raises:
        ValueError: See `PooledTables`.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.models import SequenceTables
        >>> tables = SequenceTables({"history": 10}, embedding_dim=4)
        >>> tables({"history": Ragged(torch.tensor([2, 3, 4]), torch.tensor([0, 3, 3]))})["history"].shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        *,
        embedding_dim: int = 64,
        init: Callable[[Tensor], Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tables = describe(cardinalities, embedding_dim, init)
        self.embeddings = nn.ModuleDict(
            {
                name: RawTable(embedding_dim, size, device)
                if isinstance(size, RawIds)
                else nn.Embedding(size, embedding_dim, device=device)
                for name, size in cardinalities.items()
            }
        )
        _fill(self.embeddings, self.tables)

    def embedding_configs(self) -> list[Table]:
        """The tables, in order."""
        return self.tables

    def forward(self, batch: Columns) -> dict[str, Tensor]:
        """Look up, for each column, the vectors of its codes, list after list: shape (codes, embedding_dim)."""
        ids = {name: ids_of(batch, name) for name in self.embeddings}
        return {
            name: self.embeddings[name](_index(one.values if isinstance(one, Ragged) else one, name))
            for name, one in ids.items()
        }


@torch.no_grad()
def _fill(modules: nn.ModuleDict, tables: list[Table]) -> None:
    """Initialize the tables that have memory."""
    for table in tables:
        weight: Any = modules[table.name].weight
        if not isinstance(modules[table.name], RawTable) and weight.device.type != "meta":
            table.init_fn(weight)


def _index(ids: Tensor, name: str) -> Tensor:
    """Convert the ids of a column to a type that torch can look up."""
    if ids.is_floating_point():
        raise ValueError(f"column {name!r} must have integers, which are the rows of a table, got {ids.dtype}")
    return ids if ids.dtype in (torch.int32, torch.int64, torch.uint64) else ids.long()

"""An embedding table for several columns of codes, so that a step on a GPU launches few operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import check_flag
from ..loader.columns import Columns, Ragged, ids_of
from ..raw_ids import RawIds
from .tables import PooledTables, Table, describe


class OneTable(nn.Module):
    """A table for several columns with one code per row: the rows of a column follow the rows of the column before.

    It computes what `PooledTables` computes, with one look-up and one update for all columns. On a GPU with small
    batches that is faster, because each operation takes some microseconds. For `replicate`, not for `shard`.

    A checkpoint fits only a model with the same columns, each with the same number of codes. `export_ensemble` exports
    a table for each column.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes.
        embedding_dim: The width of the table.
        sparse: Whether the gradient has only the rows of a batch. Then the optimizer must be `SGD` or `Adagrad`.
        init: A function that initializes a part of the table, shape (rows, embedding_dim), in place. It is called for
            the rows of each column. None: uniform numbers, up to the inverse square root of the number of codes.
        device: The device of the table.

    Raises:
        TypeError, ValueError: An argument is invalid, or a column has raw ids.
        IndexError: In a batch, an id has no row, and the table is on the CPU. On a GPU it fails an assertion.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import OneTable
        >>> table = OneTable({"user": 10, "movie": 5}, embedding_dim=4)
        >>> table({"user": torch.tensor([2, 9, 0]), "movie": torch.tensor([0, 1, 4])}).shape
        torch.Size([3, 8])
    """

    sizes: Tensor
    starts: Tensor

    def __init__(
        self,
        cardinalities: Mapping[str, int],
        *,
        embedding_dim: int = 64,
        sparse: bool = False,
        init: Callable[[Tensor], Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        check_flag(sparse, name="`sparse`")
        raw = [name for name, size in cardinalities.items() if isinstance(size, RawIds)]
        if raw or not cardinalities:
            got = f"raw ids for {raw[0]!r}" if raw else "no column"
            raise ValueError(f"`cardinalities` must be the number of codes of each column, got {got}: use PooledTables")
        self.tables = describe(cardinalities, embedding_dim, init)
        sizes = self._sizes()
        kind = torch.int32 if sum(sizes) < 2**31 else torch.int64
        self.table = nn.Embedding(sum(sizes), embedding_dim, sparse=sparse, device=device)
        self.register_buffer("sizes", torch.tensor(sizes, device=device))
        starts = [0, *itertools.accumulate(sizes)][:-1]
        self.register_buffer("starts", torch.tensor(starts, dtype=kind, device=device), persistent=False)
        with torch.no_grad():
            for table in self.tables:
                table.init_fn(self.embedding_bags[table.name].weight)

    def _sizes(self) -> list[int]:
        return [table.num_embeddings for table in self.tables]

    def embedding_bag_configs(self) -> list[Table]:
        """The columns as tables, in order."""
        return self.tables

    @property
    def embedding_bags(self) -> dict[str, nn.Embedding]:
        """The rows of each column as a table over the same memory."""
        parts = self.table.weight.detach().split(self._sizes())
        return {table.name: nn.Embedding.from_pretrained(part) for table, part in zip(self.tables, parts, strict=True)}

    def forward(self, batch: Columns) -> Tensor:
        """Return the vectors of a batch, shape (rows, columns * width). Other columns of the batch are ignored."""
        ids = torch.stack([self._column(batch, table.name) for table in self.tables], dim=1)  # (rows, columns)
        # A wrong id would be the row of another column.
        inside = ((ids >= 0) & (ids < self.sizes)).all()
        if inside.is_cpu and not torch.compiler.is_compiling():
            if not inside:
                raise IndexError("an id of the batch has no row in the table")
        else:
            torch._assert_async(inside, "an id of the batch has no row in the table")
        return self.table(ids + self.starts).flatten(1)  # type: ignore[no-any-return]

    def _column(self, batch: Columns, name: str) -> Tensor:
        ids = ids_of(batch, name)
        if isinstance(ids, Ragged) or ids.is_floating_point():
            got = "lists" if isinstance(ids, Ragged) else ids.dtype
            raise ValueError(f"column {name!r} must have one integer per row for OneTable, got {got}: use PooledTables")
        return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()

    def apart(self) -> PooledTables:
        """Return the same as a table for each column."""
        sizes = {table.name: table.num_embeddings for table in self.tables}
        plain = PooledTables(sizes, embedding_dim=self.table.embedding_dim, device=self.table.weight.device)
        parts = {f"embedding_bags.{name}.weight": part.weight for name, part in self.embedding_bags.items()}
        plain.load_state_dict(parts)
        return plain

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the weights; raise `ValueError` for weights of other columns, whose rows are in other places."""
        found = state_dict.get(f"{prefix}sizes")
        if found is not None and (there := found.tolist()) != self._sizes():
            self.sizes.copy_(torch.tensor(self._sizes()))  # a checkpoint was read into it
            raise ValueError(f"the numbers of codes of OneTable must be {there}, as saved, got {self._sizes()}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

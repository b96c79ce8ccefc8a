"""Columns of a batch: dense tensors, and lists of different lengths as values and offsets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Ragged(NamedTuple):
    """A column with a list in each row: row i has ``values[offsets[i]:offsets[i + 1]]``.

    This is the format of `torch.nn.functional.embedding_bag` with ``include_last_offset=True``.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> Ragged(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3])).lengths  # [7, 8], [] and [9]
        tensor([2, 0, 1])
    """

    values: Tensor
    """The elements of all lists, one list after the other; shape (total,)."""
    offsets: Tensor
    """The offsets of the lists, shape (rows + 1,), int64, from 0 to total."""

    @property
    def lengths(self) -> Tensor:
        """Return the length of each list; shape (rows,), int64."""
        return self.offsets[1:] - self.offsets[:-1]


Column: TypeAlias = Tensor | Ragged
"""A column: a tensor of shape (rows, ...), or one list per row."""
Columns: TypeAlias = dict[str, Column]


class KeyedIds(NamedTuple):
    """The ids of some columns of a batch in one piece, in TorchRec's format."""

    keys: list[str]
    """The names of the columns."""
    values: Tensor
    """The ids, int32, shape (ids,): key after key."""
    lengths: Tensor
    """The lengths of the lists, int32, shape (keys * rows,), in the same order."""
    counts: list[int]
    """The number of ids of each key."""
    rows: int
    limits: dict[str, tuple[int, int]]
    """The smallest and the largest id of each key that has any."""


class Batch(dict[str, Column]):
    """The columns of a batch, and the ids of some of them in one piece, made by the loader.

    Args:
        columns: All columns of the batch.
        ids: The ids of some columns. None: no columns have ids.
    """

    def __init__(self, columns: Columns, ids: KeyedIds | None = None) -> None:
        super().__init__(columns)
        self._ids, self._made_of = ids, {key: _state(columns[key]) for key in ids.keys} if ids else {}

    @functools.cached_property
    def _jagged(self) -> KeyedJaggedTensor | None:
        from .jagged import LoadedJagged

        if self._ids is None:
            return None
        keys, values, lengths, counts, rows, limits = self._ids
        return LoadedJagged(limits, keys=keys, values=values, lengths=lengths, length_per_key=counts, stride=rows)

    def keyed(self, keys: Sequence[str]) -> KeyedJaggedTensor | None:
        """Return the keyed jagged tensor of the `keys`, in their order; None if it was not made."""
        return self.prepared if self._ids and list(keys) == self._ids.keys else None

    @property
    def prepared(self) -> KeyedJaggedTensor | None:
        """Return TorchRec's keyed jagged tensor of `ids`, unless a column has been changed since."""
        same = all(key in self and _state(self[key]) == state for key, state in self._made_of.items())
        return self._jagged if same else None


def _state(column: Column) -> list[tuple[int, int]]:
    """Return the identity and the version of a column, which change when the column is replaced or written to."""
    parts = column if isinstance(column, Ragged) else (column,)
    return [(id(part), version_of(part)) for part in parts]


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of writes to a tensor; -1 if autograd does not count them."""
    return -1 if tensor.is_inference() else tensor._version


# torch stores unsigned integers wider than a byte but has few kernels for them; the bits can be moved as signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def rows_of(column: Column) -> int:
    """Return the number of rows of a column."""
    return len(column.offsets) - 1 if isinstance(column, Ragged) else len(column)


def bytes_of(column: Column) -> int:
    """Return the bytes of memory of a column."""
    parts = column if isinstance(column, Ragged) else (column,)
    return sum(part.numel() * part.element_size() for part in parts)


def take(column: Column, index: Tensor, pinned: bool = False) -> Column:
    """Return the rows of a column at `index` (shape (n,), integers), in that order, in new memory.

    Args:
        column: The column.
        index: The numbers of the rows.
        pinned: Whether tensors on the CPU go to page-locked memory, from which they are copied to a GPU.
    """
    if isinstance(column, Ragged):
        index = index.to(column.offsets.device)
        first = column.offsets.index_select(0, index)
        lengths = column.offsets[1:].index_select(0, index) - first
        offsets = empty_like(column.offsets, len(index) + 1, pinned)
        offsets[:1] = 0
        torch.cumsum(lengths, 0, out=offsets[1:])
        # Value j of the result lies in list i and comes from first[i] + (j - offsets[i]).
        positions = torch.repeat_interleave(first - offsets[:-1], lengths)
        positions += torch.arange(len(positions), device=positions.device)
        return Ragged(_select(column.values, positions, pinned), offsets)
    return _select(column, index, pinned)


def _select(tensor: Tensor, index: Tensor, pinned: bool) -> Tensor:
    signed = _SIGNED.get(tensor.dtype)
    if signed is not None:
        return _select(tensor.view(signed), index, pinned).view(tensor.dtype)
    index = index.to(tensor.device)
    if not pinned or tensor.requires_grad:
        return tensor.index_select(0, index)
    return torch.index_select(tensor, 0, index, out=empty_like(tensor, len(index), True))


def empty_like(tensor: Tensor, rows: int, pinned: bool) -> Tensor:
    """Allocate memory for rows of a tensor's shape, dtype and device; on the CPU, if `pinned`, in page-locked
    memory."""
    pinned = pinned and tensor.device.type == "cpu"
    return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device, pin_memory=pinned)


def split(tensor: Tensor, boundaries: Sequence[int]) -> Sequence[Tensor]:
    """Split a column at these rows. The last number is the end of the last part. One call takes a fifth of the time of
    slices. Autograd keeps a separate record of writes for each part."""
    return tensor.unsafe_split_with_sizes([stop - start for start, stop in itertools.pairwise(boundaries)])


def join(parts: Sequence[Column]) -> Column:
    """Join columns of one kind and dtype; a single column is not copied."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values if isinstance(part, Ragged) else part for part in parts])
    lists = [part for part in parts if isinstance(part, Ragged)]
    if not lists:
        return values
    offsets = torch.zeros(sum(map(rows_of, lists)) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(torch.cat([part.lengths for part in lists]), 0, out=offsets[1:])
    return Ragged(values, offsets)


def ids_of(batch: Mapping[str, Column], name: str) -> Column:
    """Return a column of ids: one per row, shape (rows,), or lists of them.

    Raises:
        ValueError: A column is missing, or has a different shape.
    """
    if name not in batch:
        raise ValueError(f"the batch has no column {name!r}; its columns are {', '.join(batch)}")
    column = batch[name]
    if not isinstance(column, Ragged) and column.ndim != 1:
        raise ValueError(f"column {name!r} has shape {tuple(column.shape)}: a list or one id per row is needed")
    return column


def keyed_jagged(batch: Mapping[str, Column], keys: Sequence[str]) -> KeyedJaggedTensor:
    """Return TorchRec's `KeyedJaggedTensor` of some columns of a batch, the loader's own if it was made with `keyed=`.

    Args:
        batch: A batch of a loader.
        keys: The columns to use, all of one dtype: lists, or one id per row (shape (rows,)), which becomes a list of
            one. Other columns are left out.

    Raises:
        ValueError: A column is missing, has a different shape, or has a different dtype than the first.
        ImportError: TorchRec is not installed.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.loader import MemoryLoader, keyed_jagged
        >>> rows = pl.DataFrame({"user": [5, 6], "genres": [[1, 2, 3], []], "liked": [True, False]})
        >>> for batch in MemoryLoader(rows, 2):
        ...     features = keyed_jagged(batch, ["user", "genres"])
        >>> features.keys()
        ['user', 'genres']
        >>> features["genres"].values(), features["genres"].lengths()
        (tensor([1, 2, 3]), tensor([3, 0]))
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    made = batch.keyed(keys) if isinstance(batch, Batch) else None
    if made is not None:
        return made
    values, lengths = [], []
    for key in keys:
        column = ids_of(batch, key)
        values.append(column.values if isinstance(column, Ragged) else column)
        lengths.append(column.lengths if isinstance(column, Ragged) else torch.ones_like(column, dtype=torch.int64))
        if values[-1].dtype != values[0].dtype:
            raise ValueError(
                f"columns must have one dtype, got {values[-1].dtype} in {key!r} and {values[0].dtype} in {keys[0]!r}: "
                "cast one of them"
            )
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        length_per_key=[each.numel() for each in values],  # TorchRec would add it up, and on a GPU wait for that
    )

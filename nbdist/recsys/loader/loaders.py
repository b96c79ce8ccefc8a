"""Batches for every rank, from Parquet files or from memory: equal numbers of steps, one shuffle for all, resumable.

A loader is used like a `torch.utils.data.DataLoader`, and divides the rows among the ranks by itself::

    loader = ParquetLoader("train/*.parquet", 4096, shuffle=True, device=device)
    for batch in loader:
        loss = model(batch["user"], batch["item"])

No other library may divide it again. accelerate's `prepare` and, under nbdist, fastai's `distrib_ctx` do not change it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..io.partition import Partition
from ..io.row_groups import Piece, slice_groups, windows
from ..io.storage import Paths
from .base import Loader
from .batches import BLOCK_BYTES, Window
from .columns import Columns, rows_of
from .parquet import ParquetFiles
from .tables import dtype_of, to_table


class MemoryLoader(Loader):
    """Batches from memory. A shuffle puts all rows into a random order that is equal on any CPU or GPU.

    Args:
        data: Tensors, NumPy arrays or `Ragged` in a mapping (batches are dicts) or in a tuple or list (batches are
            tuples), all with the same number of rows; or a polars or pandas frame, or an Arrow table. Tensors may be on
            a GPU. Tensors and arrays are not copied, unless their rows are scattered in memory, as in an array of a
            data frame's columns: gathering them would take 5 to 40 times as long.
        batch_size: The number of rows of a step on each rank.
        shuffle, seed, remainder, keyed, transform, device, prefetch, pin_memory, rank, world_size: As for
            `nbdist.recsys.loader.base.Loader`.

    Raises:
        TypeError, ValueError: A column cannot be made into batches, has nulls, or has a different length than the
            others. The error names the column.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> rows = {"user": torch.tensor([7, 8, 9]), "liked": torch.tensor([True, False, True])}
        >>> for batch in MemoryLoader(rows, 2):
        ...     print(batch["user"], batch["liked"])
        tensor([7, 8]) tensor([ True, False])
        tensor([9]) tensor([True])
    """

    _waits = False
    table: Columns

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        remainder: str = "keep",
        keyed: Sequence[str] = (),
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | int | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._tuples = isinstance(data, (tuple, list))
        self.table = to_table(data)
        first = next(iter(self.table))
        for name, column in self.table.items():
            if rows_of(column) != self.rows:
                raise ValueError(
                    f"columns must have equal numbers of rows, got {rows_of(column)} in {name!r} and {self.rows} in "
                    f"{first!r}"
                )
        super().__init__(
            batch_size,
            shuffle=shuffle,
            seed=seed,
            remainder=remainder,
            keyed=keyed,
            transform=transform,
            device=device,
            prefetch=prefetch,
            pin_memory=pin_memory,
            rank=rank,
            world_size=world_size,
        )

    @property
    def rows(self) -> int:
        return rows_of(next(iter(self.table.values())))

    def _shape(self, batch: Columns) -> Any:
        return tuple(batch.values()) if self._tuples else batch

    def _windows(self, partition: Partition, rank: int, epoch: int, position: int) -> Iterator[Window]:
        yield self._everything(self.table, partition, rank, epoch)

    def _names(self) -> list[str]:
        return [] if self._tuples else list(self.table)

    def _fingerprint(self) -> str:
        return _digest([(name, dtype_of(column)) for name, column in self.table.items()])


class ParquetLoader(Loader):
    """Batches from Parquet files, which may be larger than memory.

    If the rows take less than half of `memory_bytes`, each rank reads all of them once and shuffles them like
    `MemoryLoader`. Otherwise a rank reads only its share: an epoch shuffles the row groups of all files and divides
    their rows among the ranks, and each rank shuffles its rows in windows as large as `memory_bytes` allows. If the
    files were written shuffled, and their row groups are small compared to a window, this is as good as a full shuffle.

    Args:
        files: A file, a folder, a glob pattern, or several of these, all with the same schema.
        batch_size: The number of rows of a step on each rank.
        columns: The names of the columns to read: numbers, booleans, or lists of them, without nulls. None: all.
        memory_bytes: The number of bytes that a rank may use for rows.
        shuffle, seed, remainder, keyed, transform, device, prefetch, pin_memory, rank, world_size: As for
            `nbdist.recsys.loader.base.Loader`.

    Raises:
        FileNotFoundError, ValueError: The errors of `ParquetFiles`; or `memory_bytes` is too small for the largest row
            group.

    Examples:
        >>> import polars as pl
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import ParquetLoader
        >>> pl.DataFrame({"user": range(8)}).write_parquet("train.parquet")
        >>> def users_of_this_rank():
        ...     return [batch["user"].tolist() for batch in ParquetLoader("train.parquet", 2)]
        >>> in_ddp(2, users_of_this_rank)
        [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        files: Paths,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
        memory_bytes: int = 1 << 29,
        shuffle: bool = False,
        seed: int | None = None,
        remainder: str = "keep",
        keyed: Sequence[str] = (),
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | int | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._files = ParquetFiles(files, columns)
        self.table: Columns | None = None
        size, rows = self._files.size, self.rows
        self.whole = size + 8 * rows <= memory_bytes // 2
        """True if all rows are held in memory."""
        largest = max(self._files.groups, key=lambda group: group.size)
        # Apart from the window of rows: a row group of Arrow's, decoded and not yet, and the blocks made ahead.
        batch = -(-size // rows) * batch_size
        ahead = 2 if prefetch is None else prefetch
        other_bytes = 2 * largest.size + (ahead + 3) * max(BLOCK_BYTES, batch)
        # Allocators keep a little more than they are asked for.
        self.window = memory_bytes - memory_bytes // 16 - other_bytes
        """The number of bytes of the rows in memory, if not all rows are."""
        if not self.whole and self.window < largest.size + 8 * largest.rows:
            need = -(-16 * (largest.size + 8 * largest.rows + other_bytes) // 15)
            raise ValueError(
                f"{self._files.paths[largest.file]}: row group {largest.number} has {largest.rows} rows, which take "
                f"{largest.size} bytes; with memory_bytes={memory_bytes} it cannot be read. Use memory_bytes={need} or "
                "more, or write the file with smaller row groups"
            )
        super().__init__(
            batch_size,
            shuffle=shuffle,
            seed=seed,
            remainder=remainder,
            keyed=keyed,
            transform=transform,
            device=device,
            prefetch=prefetch,
            pin_memory=pin_memory,
            rank=rank,
            world_size=world_size,
        )

    @property
    def rows(self) -> int:
        return len(self._files)

    def _windows(self, partition: Partition, rank: int, epoch: int, position: int) -> Iterator[Window]:
        if not self.whole:
            yield from self._stream(partition, rank, epoch, position)
            return
        if self.table is None:
            self.table = self._files.read([Piece(group, 0, group.rows) for group in self._files.groups])
        yield self._everything(self.table, partition, rank, epoch)

    def _stream(self, partition: Partition, rank: int, epoch: int, position: int) -> Iterator[Window]:
        """Iterate over the windows that `rank` reads for an epoch; windows before `position` are not read."""
        groups, shift = self._files.groups, 0
        if self.shuffle:
            generator = self._generator(epoch)
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
            # The ranks' shares begin elsewhere each time, so that a few large groups are divided differently too.
            shift = int(torch.randint(partition.rows, (), generator=generator).item())
        start, stop = partition.span(rank)
        repeats = partition.repeats(rank)
        pieces = slice_groups(groups, start + shift, stop - start - repeats)
        # A repeated row has a window of its own: it is to be the last, wherever the others go.
        each = [
            windows(pieces, self.window if self.shuffle else 0),
            windows(slice_groups(groups, stop - 1 + shift, repeats), 0),
        ]
        todo = [(sum(p.stop - p.start for p in window), window) for window in itertools.chain(*each)]
        room = max(rows for rows, _ in todo)
        spare: dict[str, torch.Tensor] = {}
        orders = torch.arange(room)
        for number, (rows, window) in enumerate(todo):
            if start + rows > position:
                order = orders[:rows]
                if self.shuffle:
                    torch.randperm(rows, generator=self._generator(epoch, rank, number), out=order)
                yield Window(start, self._files.read(window, spare, room), order)
            start += rows

    def _names(self) -> list[str]:
        return list(self._files.types)

    def _fingerprint(self) -> str:
        types = [(name, str(kind)) for name, kind in self._files.types.items()]
        return _digest([types, self._files.groups, None if self.whole else self.window])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "table": None}  # read again where it arrives, and not sent


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()

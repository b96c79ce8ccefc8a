"""Rows of Parquet files and Arrow tables as tensors: what a file holds, what that takes in memory, parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from ..io import storage
from ..io.inspection import inspect
from ..io.row_groups import Piece
from ..io.storage import Paths
from .columns import Columns, Ragged, join
from .tables import check_type, is_list, to_columns


class ParquetFiles:
    """The chosen columns of Parquet files with one schema; reads footers only until `read` is called.

    Args:
        files: As for `storage.find`.
        columns: Which columns, in this order. None: all.

    Raises:
        FileNotFoundError: for what does not exist.
        ValueError: naming file and column: not a Parquet file, no such column, a type that has no tensor, another type
            than in the first file, or no row in any file.
    """

    def __init__(self, files: Paths, columns: Sequence[str] | None = None) -> None:
        def look(path: storage.Location) -> tuple[Any, dict[str, pa.DataType], Any]:
            with storage.parquet(path) as opened:
                return opened.metadata, _chosen(opened.schema_arrow, columns, path), opened.metadata

        found = inspect(files, look, _size, "; columns= leaves it out")
        self.paths, self.types, self.groups = found.paths, found.types, found.groups
        footers = zip(self.paths, found.opened, strict=True)
        self._footers = {path: footer for path, footer in footers if storage.is_uri(path)}  # which are far to go for

    def __len__(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def size(self) -> int:
        """Bytes of all rows as tensors."""
        return sum(group.size for group in self.groups)

    def read(self, pieces: Sequence[Piece], spare: dict[str, Tensor] | None = None, room: int = 0) -> Columns:
        """The rows of the pieces, one after the other.

        Args:
            pieces: Which rows.
            spare: Memory for dense columns, kept here from one call to the next: the result of the call before is then
                overwritten. (Freed and taken anew, twice as much of it would stay with the process.)
            room: How many rows `spare` is to hold at least.

        Raises:
            ValueError: naming the file: it has changed since it was first looked at, or a column has nulls.
        """
        parts: list[Columns] = []
        columns: Columns = {}
        total = sum(stop - start for _, start, stop in pieces)
        row = 0
        for group, start, stop in pieces:
            path = self.paths[group.file]
            where = f"{path}, row group {group.number}"
            try:
                with storage.parquet(path, self._footers.get(path)) as opened:
                    table = opened.read_row_group(
                        group.number, columns=list(self.types), use_threads=torch.get_num_threads() > 1
                    )
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{where}: cannot be read: {error}") from error
            if table.num_rows != group.rows:
                raise ValueError(f"{where}: has changed since the loader was made; make a new one")
            part = to_columns(table.slice(start, stop - start), where)
            del table
            # Dense columns go straight to their place: the pieces and the whole are not in memory together.
            for name, column in list(part.items()):
                if not isinstance(column, Ragged):
                    if name not in columns:
                        columns[name] = _memory(name, column, total, room, spare)
                    whole = columns[name]
                    assert isinstance(whole, Tensor)
                    whole[row : row + len(column)] = column
                    del part[name]
            row += stop - start
            parts.append(part)
        for name in self.types:
            if name not in columns:
                columns[name] = join([part.pop(name) for part in parts])
        pa.default_memory_pool().release_unused()  # Arrow keeps freed memory, which would count twice
        return {name: columns[name] for name in self.types}


def _memory(name: str, like: Tensor, rows: int, room: int, spare: dict[str, Tensor] | None) -> Tensor:
    """Memory for `rows` rows of a column."""
    if spare is None:
        return like.new_empty(rows, *like.shape[1:])
    if name not in spare or len(spare[name]) < rows:
        spare[name] = like.new_empty(max(rows, room), *like.shape[1:])
    return spare[name][:rows]


def _chosen(schema: pa.Schema, columns: Sequence[str] | None, path: storage.Location) -> dict[str, pa.DataType]:
    names = list(schema.names if columns is None else columns)
    if not names:
        raise ValueError(f"{path}: no columns")
    for name in names:
        if schema.names.count(name) != 1:
            raise ValueError(
                f"{path}: column {name!r} is there {schema.names.count(name)} times; it has {schema.names}"
            )
        check_type(schema.field(name).type, f"{path}: column {name!r}")
    return {name: schema.field(name).type for name in names}


def _size(group: Any, types: Mapping[str, pa.DataType]) -> int:
    """Bytes of a row group's chosen columns as tensors. Exact: Parquet says how many values there are."""
    size = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        kind = types.get(chunk.path_in_schema.split(".")[0])
        if kind is None:
            continue
        nested = is_list(kind) or pa.types.is_fixed_size_list(kind)
        inner = kind.value_type if nested else kind
        width = 1 if pa.types.is_boolean(inner) else inner.bit_width // 8
        size += chunk.num_values * width * (2 if is_list(kind) else 1) + (16 * group.num_rows if is_list(kind) else 0)
    return size

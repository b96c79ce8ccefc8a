"""Rows of Parquet files and Arrow tables as tensors: the content of a file, its size in memory, parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from ..io import storage
from ..io.footers import Footers
from ..io.inspection import inspect
from ..io.row_groups import Piece, RowGroup
from ..io.storage import Paths
from .columns import Columns, Ragged, join
from .tables import check_type, innermost, is_list, is_ragged, to_columns


class ParquetFiles:
    """The chosen columns of Parquet files with one schema. Only footers are read until `read` is called.

    Args:
        files: As for `storage.find_partitioned`.
        columns: The names of the columns, in this order. None: all; columns in the names of folders are last.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file is not Parquet, a column is missing, has a type without a tensor or another type than in the
            first file, or there are no rows. The error names file and column.
    """

    def __init__(self, files: Paths, columns: Sequence[str] | None = None) -> None:
        self._footers = Footers()

        def look(file: storage.Found) -> tuple[list[str], dict[str, pa.DataType], Any]:
            with self._footers.open(file.location) as opened:
                schema = opened.schema_arrow
                names = schema.names if columns is None else columns
                there = [name for name in names if name in schema.names or name not in file.partition]
                types = _chosen(schema, there, file.location)
                return _roots(schema), types, opened.metadata

        found = inspect(files, look, _size, "; columns= leaves it out")
        self.paths = found.paths
        self._partitions: dict[str, list[int]] = {}
        for name, values in found.partitions.items():
            if columns is not None and name not in columns:
                continue
            self._partitions[name] = [value for value in values if isinstance(value, int)]
            if len(self._partitions[name]) < len(values):
                raise ValueError(
                    f"{self.paths[0]}: column {name!r} comes from the names of folders, and its values are not "
                    "integers, "
                    "so it has no tensor: choose the columns to read with columns="
                )
        types = {**found.types, **dict.fromkeys(self._partitions, pa.int64())}
        self.types = {name: types[name] for name in (types if columns is None else columns)}
        more = 8 * len(self._partitions)
        self.groups = [group._replace(size=group.size + more * group.rows) for group in found.groups]

    def __len__(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def size(self) -> int:
        """Return the bytes of all rows as tensors."""
        return sum(group.size for group in self.groups)

    def read(self, pieces: Sequence[Piece], spare: dict[str, Tensor] | None = None, room: int = 0) -> Columns:
        """Read the rows of the pieces, one after the other.

        Args:
            pieces: The rows to read.
            spare: Memory for dense columns, which is kept here from one call to the next: a call overwrites the result
                of the last one. (If it were freed and allocated again, the process would keep it twice.)
            room: The smallest number of rows in `spare`.

        Raises:
            ValueError: A file has changed since it was first read, or a column has nulls, or lists of lists of
                different lengths. The error names the file.
        """
        parts: list[Columns] = []
        columns: Columns = {}
        total = sum(stop - start for _, start, stop in pieces)
        row = 0
        for group, start, stop in pieces:
            path = self.paths[group.file]
            where = f"{path}, row group {group.number}"
            table = self._read(group, path, where)
            part = to_columns(table.slice(start, stop - start), where)
            del table
            for name, values in self._partitions.items():
                part[name] = torch.full((stop - start,), values[group.file], dtype=torch.int64)
            # Dense columns go straight to their place: the pieces and the whole are not in memory together.
            for name, column in list(part.items()):
                if not isinstance(column, Ragged):
                    if name not in columns:
                        columns[name] = _memory(name, column, total, room, spare)
                    whole = columns[name]
                    assert isinstance(whole, Tensor)
                    if whole.shape[1:] != column.shape[1:]:
                        raise ValueError(
                            f"{where}: column {name!r} must have lists of equal lengths in all row groups, got "
                            f"{tuple(column.shape[1:])}, and {tuple(whole.shape[1:])} before: pad them"
                        )
                    whole[row : row + len(column)] = column
                    del part[name]
            row += stop - start
            parts.append(part)
        for name in self.types:
            if name not in columns:
                columns[name] = join([part.pop(name) for part in parts])
        pa.default_memory_pool().release_unused()  # Arrow keeps freed memory, which would count twice
        return {name: columns[name] for name in self.types}

    def _read(self, group: RowGroup, path: storage.Location, where: str) -> pa.Table:
        """Read the columns of a row group that are in its file, which may have changed since it was inspected."""
        names = [name for name in self.types if name not in self._partitions]
        changed = ""
        try:
            with self._footers.open(path) as opened:
                schema = opened.schema_arrow
                if missing := [name for name in names if name not in schema.names]:
                    changed = f"column {missing[0]!r} is gone"
                elif other := [name for name in names if _plain(schema.field(name).type) != self.types[name]]:
                    changed = f"column {other[0]!r} is {schema.field(other[0]).type}, and was {self.types[other[0]]}"
                elif group.number >= opened.num_row_groups:
                    changed = f"it has {opened.num_row_groups} row groups"
                else:
                    threads = torch.get_num_threads() > 1
                    table = opened.read_row_group(group.number, columns=names, use_threads=threads)
                    if table.num_rows == group.rows:
                        return table.select(names)  # of "user", Arrow reads "user.id" too
                    changed = f"it has {table.num_rows} rows, and had {group.rows}"
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{where}: cannot be read: {error}") from error
        raise ValueError(f"{where}: has changed since the loader was made: {changed}; make a new one")


def _memory(name: str, like: Tensor, rows: int, room: int, spare: dict[str, Tensor] | None) -> Tensor:
    """Return the memory for `rows` rows of a column."""
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
                f"{path}: column {name!r} must be in the file once, got {schema.names.count(name)} times in "
                f"{schema.names}"
            )
        check_type(schema.field(name).type, f"{path}: column {name!r}")
    return {name: _plain(schema.field(name).type) for name in names}


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without distinctions that tensors lack: pandas writes lists with small offsets, polars with large
    ones."""
    return pa.large_list(_plain(kind.value_type)) if is_list(kind) else kind


def _roots(schema: pa.Schema) -> list[str]:
    """Return the column of each leaf of a file's schema. The path of a leaf is not enough, because names may have
    dots."""
    return [field.name for field in schema for _ in range(_leaves(field.type))]


def _leaves(kind: pa.DataType) -> int:
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1


def _size(group: Any, types: Mapping[str, pa.DataType], roots: Sequence[str]) -> int:
    """Return the exact number of bytes of a row group's chosen columns as tensors, from the number of values in the
    footer."""
    size = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        kind = types.get(roots[index])
        if kind is None:
            continue
        inner, ragged = innermost(kind), is_ragged(kind)
        width = 1 if pa.types.is_boolean(inner) else inner.bit_width // 8
        size += chunk.num_values * width * (2 if ragged else 1) + (16 * group.num_rows if ragged else 0)
    return size

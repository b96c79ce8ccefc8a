"""Inspection of Parquet files before they are read: their number, their common schema, their row groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from . import storage
from .row_groups import RowGroup

Opened = TypeVar("Opened")


class NoRows(ValueError):
    """The error for an input without rows."""


@dataclass(frozen=True)
class Inspected(Generic[Opened]):
    """Files with one schema and at least one row, in order."""

    paths: list[storage.Location]
    types: Mapping[str, Any]
    """The columns, in the order of the first file. Other files may have a different order."""
    opened: list[Opened]
    """The result of `look` for each file."""
    groups: list[RowGroup]
    """The row groups that are not empty."""
    partitions: Mapping[str, list[int | str | None]]
    """The columns that are only in the names of folders: the value for each file."""


def inspect(
    files: storage.Paths,
    look: Callable[[storage.Found], tuple[Opened, Mapping[str, Any], pq.FileMetaData]],
    size: Callable[[pq.RowGroupMetaData, Mapping[str, Any], Any], int] = lambda group, types, opened: 0,
    hint: str = "",
) -> Inspected[Opened]:
    """Read the footers of Parquet files.

    Args:
        files: As for `storage.find`.
        look: A function that opens a file and returns an object to keep for it, the types of its columns, and its
            footer.
        size: A function that returns the `RowGroup.size` of a row group, given the row group, the types, and the object
            of its file.
        hint: A text that is added to the error for a column that the first file lacks.

    Raises:
        FileNotFoundError: A file does not exist.
        NoRows: The files have no rows.
        ValueError: A file is not Parquet, or has a different schema than the first. The error names file and column.
    """
    named = storage.find_partitioned(files)
    paths = [one.location for one in named]
    if not paths:
        raise ValueError("files must name at least one file, got none")
    result: Inspected[Opened] = Inspected(paths, {}, [], [], {})
    for number, (path, file) in enumerate(zip(paths, named, strict=True)):
        try:
            opened, types, footer = look(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a whole Parquet file: {error}") from error
        if number == 0:
            result = Inspected(paths, types, [], [], storage.partitions(named, types))
        _compare(result.types, types, path, f"in {paths[0]}", hint)
        result.opened.append(opened)
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows:
                result.groups.append(RowGroup(number, index, group.num_rows, size(group, types, opened)))
    if not result.groups:
        raise NoRows(f"{paths[0]}: no rows in {len(paths)} file(s)")
    return result


def _compare(
    expected: Mapping[str, Any], found: Mapping[str, Any], where: storage.Location, what: str, hint: str
) -> None:
    for name, kind in expected.items():
        if name not in found:
            raise ValueError(f"{where}: no column {name!r}, which is {what}")
        if found[name] != kind:
            raise ValueError(
                f"{where}: column {name!r} is {found[name]}, but {kind} {what}: cast it in one of the files, and write "
                "that file again"
            )
    if more := [name for name in found if name not in expected]:
        raise ValueError(f"{where}: column {more[0]!r} is not {what}{hint}")

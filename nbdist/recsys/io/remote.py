"""Parquet files behind URIs as polars frames: only the needed row groups and columns are fetched."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from . import storage


def scan(location: storage.Location) -> pl.LazyFrame:
    """Return all rows of a Parquet file, local or remote, as a lazy frame."""
    if isinstance(location, str):
        file = RemoteFile(location)
        return file.slice(0, file.footer.num_rows)
    # Not what the path means to polars: neither its brackets as a pattern nor "year=2020" as a column.
    return pl.scan_parquet(location, glob=False, hive_partitioning=False)


def scan_all(files: storage.Paths) -> tuple[pl.LazyFrame, storage.Location]:
    """Return all rows of some Parquet files, with the columns in the names of folders, and the first of the files."""
    named = storage.find_partitioned(files)
    frames = [scan(one.location) for one in named]
    columns = frames[0].collect_schema() if any(one.partition for one in named) else ()
    for name, values in storage.partitions(named, columns).items():
        frames = [
            frame.with_columns(constant(value, values).alias(name)) for frame, value in zip(frames, values, strict=True)
        ]
    return pl.concat(frames), named[0].location


def constant(value: int | str | None, values: Sequence[int | str | None]) -> pl.Expr:
    """Make a literal of one value of a partition. Its type is the type that all `values` have: int64 or string."""
    return pl.lit(value, pl.Int64 if any(isinstance(one, int) for one in values) else pl.String)


class RemoteFile:
    """A remote file, whose footer is read once. polars could open it, too, but accepts no options in a URI.

    Attributes:
        footer: The description of the row groups by Parquet.
        schema: Names and types of the columns.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        with storage.parquet(uri) as opened:
            self.footer, empty = opened.metadata, opened.schema_arrow.empty_table()
        self.schema = _frame(empty).schema

    def select(self, names: Sequence[str]) -> RemoteFile:
        """Return the same file with its columns in this order."""
        file = copy.copy(self)
        file.schema = pl.Schema({name: self.schema[name] for name in names})
        return file

    def slice(self, start: int, rows: int) -> pl.LazyFrame:
        """Return some rows, fetched when the frame is computed."""
        sizes = [self.footer.row_group(number).num_rows for number in range(self.footer.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        begins = [end - size for end, size in zip(ends, sizes, strict=True)]
        wanted = [
            i for i, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < start + rows and start < end
        ]

        def read(
            columns: list[str] | None, predicate: pl.Expr | None, most: int | None, _size: int | None
        ) -> Iterator[pl.DataFrame]:
            with storage.parquet(self.uri, self.footer) as opened:
                table = opened.read_row_groups(wanted, columns=self.schema.names() if columns is None else columns)
            frame = _frame(table.slice(start - begins[wanted[0]] if wanted else 0, rows)).select(columns or pl.all())
            frame = frame if predicate is None else frame.filter(predicate)
            yield frame if most is None else frame.head(most)

        return register_io_source(read, schema=self.schema)


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame

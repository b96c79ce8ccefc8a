"""Histories: the items of each user, ordered by time, as a list for each user or for each row."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from .. import ranks
from ..io.folders import atomic_folder
from .inputs import Input, Part, Source, opened, row_bytes, rows_in
from .ops.step import ROW, names_of
from .output import OutputFiles, Placed, Places, Spill, divide, plain, write_buckets
from .splitting import Frame, as_frame, check_columns, known_time

_NUMBER = 8  # bytes of a row's number


def sequences(
    rows: Frame, *columns: str, by: str | Sequence[str] = "user", time: str = "timestamp", length: int | None = None
) -> Frame:
    """Return a row for each user, with lists of the values from the user's rows, ordered by time.

    Rows with the same time keep their order; a null or NaN time comes before all others. Users are in the order of
    their first row.

    Args:
        rows: A frame of polars or pandas, an Arrow table, or a dict of columns. A lazy frame stays lazy.
        *columns: The columns to make lists of, such as the movie.
        by: The column of users. Several columns: each combination of their values is a user.
        time: The column by which rows are ordered.
        length: The number of last rows of each user in the lists. None: all.

    Raises:
        ValueError: A column is missing or none is named, or `length` is below 1.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import sequences
        >>> rows = pl.DataFrame({"user": [1, 2, 1, 1], "movie": [30, 10, 10, 20], "timestamp": [3, 1, 1, 2]})
        >>> sequences(rows, "movie", length=2).rows()
        [(1, [20, 30]), (2, [10])]
    """
    rows = as_frame(rows)
    keys = _check(rows, columns, by, time, length)
    order = known_time(rows, time)
    lists = [pl.col(name).sort_by(order, nulls_last=False, maintain_order=True) for name in columns]
    if length is not None:
        lists = [one.tail(length) for one in lists]
    return rows.group_by(keys, maintain_order=True).agg(lists)


def with_history(
    rows: Frame,
    column: str,
    *,
    by: str | Sequence[str] = "user",
    time: str = "timestamp",
    length: int = 50,
    name: str = "history",
) -> Frame:
    """Add a column with the earlier items of the row's user, ordered by time, to each row.

    The order is as in `sequences`; the rows keep their places. This works in memory: use `write_history` for more
    rows.

    Args:
        rows: As for `sequences`.
        column: The columns to make lists of, such as the movie.
        by: The column of users. Several columns: each combination of their values is a user.
        time: The column by which rows are ordered.
        length: The largest number of earlier rows in a list.
        name: The name of the new column.

    Raises:
        ValueError: A column is missing, a column with the name `name` exists, or `length` is below 1.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import with_history
        >>> rows = pl.DataFrame({"user": [1, 2, 1, 1], "movie": [30, 10, 10, 20], "timestamp": [3, 1, 1, 2]})
        >>> with_history(rows, "movie", length=1)["history"].to_list()
        [[20], [], [], [10]]
    """
    rows = as_frame(rows)
    keys = _check(rows, [column], by, time, length)
    schema = rows.collect_schema()
    _check_name(name, schema.names())

    def run(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(_Histories(frame, column, keys, time, length).of(0, len(frame)).alias(name))

    if isinstance(rows, pl.DataFrame):
        return run(rows)
    return rows.map_batches(
        run,
        schema=pl.Schema({**schema, name: pl.List(schema[column])}),
        predicate_pushdown=False,
        projection_pushdown=False,
        slice_pushdown=False,
    )


def write_history(
    source: Source,
    folder: str | os.PathLike[str],
    column: str,
    *,
    by: str | Sequence[str] = "user",
    time: str = "timestamp",
    length: int = 50,
    name: str = "history",
    num_files: int = 8,
    row_group_size: int = 1 << 17,
    compression: str = "zstd",
    overwrite: bool = False,
    memory_bytes: int = 1 << 30,
    progress: bool = True,
) -> list[Path]:
    """Add histories to rows that may be larger than memory, and write them to ``folder/part-00000.parquet`` ...

    Ranks divide users and files among them; the result does not depend on their number, nor on `memory_bytes`. The rows
    keep their order over all files. The disk of `folder` needs as much space as the histories take in memory.

    Args:
        source: As for `Workflow.fit`.
        folder: The folder to write, which all ranks must see. It appears when all files are complete.
        column, by, time, length, name: As for `with_history`.
        num_files: The number of files. If there are fewer rows, each row gets a file. The files differ by at most one
            row.
        row_group_size: The number of rows in a row group.
        compression: The compression of the files: "zstd", "snappy", "lz4", "gzip", "brotli" or "none".
        overwrite: Whether to replace a folder of such files.
        memory_bytes: The number of bytes that a rank may use for rows. The rows of one user, without their histories,
            must fit.
        progress: Whether to show a progress bar. On several ranks, rank 0 shows it.

    Returns:
        The files, in order.

    Raises:
        FileExistsError: `folder` exists, or another process is writing it.
        FileNotFoundError, ValueError: A file or column is missing, a file has a different schema than the first, or
            there are no rows; the error names file and column. Also the errors of `with_history`.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import write_history
        >>> rows = pl.DataFrame({"user": [1, 2, 1, 1], "movie": [30, 10, 10, 20], "timestamp": [3, 1, 1, 2]})
        >>> rows.write_parquet("ratings.parquet")
        >>> files = write_history("ratings.parquet", "ratings-with-history", "movie", num_files=2)
        >>> pl.read_parquet(files)["history"].to_list()
        [[10, 20], [], [], [10]]
    """
    described = OutputFiles(num_files, row_group_size, compression, None)
    with opened(source) as given:
        keys = _check(pl.LazyFrame(schema=given.schema), [column], by, time, length)
        _check_name(name, given.schema.names())
        made: dict[str, Any] = {"column": column, "by": keys, "time": time, "length": length, "name": name}
        alike = {
            **made,
            "rows": given.rows,
            "folder": os.fspath(folder),
            "memory_bytes": memory_bytes,
            **asdict(described),
        }
        ranks.agree("write_history", **alike)
        described = replace(described, num_files=min(num_files, given.rows))
        with atomic_folder(folder, ("part-*.parquet",), overwrite) as scratch:
            _write(given, scratch, described, memory_bytes, progress, **made)
    return [Path(folder) / file for file in described.names]


def _write(
    given: Input,
    scratch: Path,
    files: OutputFiles,
    memory_bytes: int,
    progress: bool,
    column: str,
    by: list[str],
    time: str,
    length: int,
    name: str,
) -> None:
    """Write the files: first all rows of some users are gathered, then the histories of consecutive output rows."""
    columns = list(dict.fromkeys([*by, time, column]))
    sample = given.head(given.schema.names())
    history_width = length * row_bytes(sample.select(column))
    size = rows_in(memory_bytes, row_bytes(sample.select(columns)) + _NUMBER)
    parts = -(-given.rows // size)
    kept = pl.Schema({one: given.schema[one] for one in columns} | {ROW: pl.Int64()})
    users = Spill(scratch, "users", kept, parts)

    def by_user(part: Part) -> Iterator[Placed]:
        rows = part.read(columns, "streaming").with_columns(pl.int_range(part.first, part.first + part.rows).alias(ROW))
        # Categories have other numbers in each part. Whose rows come together here makes no difference in the end.
        whose = rows.select(pl.struct(pl.col(one).cast(plain(rows.schema[one])) for one in by)).to_series().hash()
        yield Placed(rows, (whose % parts).to_numpy().astype(np.int64))

    share = given.share(size)
    with ranks.progress_bar("users", sum(part.rows for part in share), progress) as bar:
        users.write(share, by_user, bar.update)
    ranks.barrier()

    whole_size = rows_in(memory_bytes, row_bytes(sample) + history_width)
    buckets = divide(given.rows, files.num_files, files.row_group_size, whole_size)
    places = Places(buckets)
    made = pl.Schema({name: pl.List(given.schema[column])})
    lists = Spill(scratch, "histories", places.schema(made), len(buckets))

    def histories(part: int) -> Iterator[Placed]:
        rows = users.read(part).sort(ROW)
        found = _Histories(rows, column, by, time, length)
        position = rows[ROW].to_numpy().astype(np.uint64)
        for start in range(0, len(rows), whole_size):
            stop = min(start + whole_size, len(rows))
            yield places.of(found.of(start, stop).alias(name).to_frame(), position[start:stop])

    with ranks.progress_bar("histories", given.rows // ranks.world_size(), progress) as bar:
        lists.write(range(ranks.rank(), parts, ranks.world_size()), histories, bar.update)
    ranks.barrier()

    def rows_of(number: int) -> pl.DataFrame:
        bucket = buckets[number]
        rows = given.read(bucket.start, bucket.stop, given.schema.names(), whole_size, "streaming")
        return rows.hstack(places.ordered(lists.read(number)))

    write_buckets(rows_of, buckets, files, scratch, progress)


class _Histories:
    """The history of each row, made when it is read, because histories are larger than the rows."""

    def __init__(self, rows: pl.DataFrame, column: str, by: list[str], time: str, length: int) -> None:
        number = pl.int_range(pl.len())
        times = known_time(rows, time)
        order = rows.select(number.sort_by(*by, times, nulls_last=False, maintain_order=True)).to_series()
        self._values = rows[column][order]
        place = rows.select(by)[order].select(number.over(by)).to_series().to_numpy()  # among the user's rows
        self._ends = np.empty(len(rows), np.int64)  # where each row is in that order
        self._ends[order.to_numpy()] = np.arange(len(rows))
        self._lengths = np.minimum(place, length)[self._ends]

    def of(self, start: int, stop: int) -> pl.Series:
        """Return the lists of the rows `start` to `stop` - 1."""
        lengths = self._lengths[start:stop]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Value j of the lists belongs to row i, and is value ends[i] - lengths[i] + (j - offsets[i]) of all.
        first = self._ends[start:stop] - lengths - offsets[:-1]
        values = self._values.gather(np.repeat(first, lengths) + np.arange(offsets[-1]))
        arrow = pa.LargeListArray.from_arrays(offsets, values.to_arrow(compat_level=pl.CompatLevel.oldest()))
        lists = pl.from_arrow(arrow)
        assert isinstance(lists, pl.Series)
        return lists.cast(pl.List(self._values.dtype))


def _check_name(name: str, columns: Sequence[str]) -> None:
    if name in columns:
        raise ValueError(f"there is a column {name!r} already: choose another name=")


def _check(
    rows: pl.DataFrame | pl.LazyFrame,
    columns: Sequence[str],
    by: str | Sequence[str],
    time: str,
    length: int | None,
) -> list[str]:
    """Return the columns of users; raise `ValueError` for invalid arguments."""
    if not columns:
        raise ValueError("`columns` must name at least one column, got none")
    keys = names_of(by)
    check_columns(rows, *keys, time, *columns)
    if length is not None and length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}")
    return keys

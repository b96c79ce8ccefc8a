"""Writing of rows that are larger than memory to Parquet files, in a random order that depends only on the seed."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from .. import ranks
from ..io.permutation import Permutation
from .inputs import Input, Part

_POSITION = "position (nbdist)"  # of a row in its bucket
_THREADS = 2  # half of the work is not polars', and done on one core
_CHUNK = 1 << 16  # rows
_Task = TypeVar("_Task")
_Progress = Callable[[int], object]
"""A function that is called with the number of rows that are done."""
COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "brotli", "none")


@dataclass(frozen=True)
class OutputFiles:
    """The files to write: number, order, row groups and compression."""

    num_files: int
    row_group_size: int
    """The number of rows in a row group."""
    compression: str
    """The compression, one of `COMPRESSIONS`."""
    seed: int | None
    """The seed of the rows' order. None: rows stay in the order of the input."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for invalid options."""
        for name, value in (("num_files", self.num_files), ("row_group_size", self.row_group_size)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(
                f"`compression` must be one of {', '.join(map(repr, COMPRESSIONS))}, got {self.compression!r}"
            )

    @property
    def names(self) -> list[str]:
        """Return the names of the files, in order."""
        return [f"part-{number:05d}.parquet" for number in range(self.num_files)]


class Bucket(NamedTuple):
    """Consecutive rows of an output file, few enough to fit into memory together."""

    file: int
    start: int
    """The position of the first row in the whole output."""
    stop: int


def write(
    given: Input,
    columns: pl.Schema,
    apply: Callable[[pl.DataFrame], pl.DataFrame],
    files: OutputFiles,
    scratch: Path,
    size: int,
    whole: bool,
    engine: Any,
    progress: bool,
) -> None:
    """Write this rank's share of the files, to ``scratch/whole``; all ranks must call it.

    Args:
        given: The rows.
        columns: The needed columns.
        apply: The function from input rows to output rows, in the same order.
        scratch: A folder that contains ``whole`` and that all ranks can reach.
        size: The number of rows in memory at a time.
        whole: Whether all rows of the input may be in memory, in addition to `size` rows.
        engine: Polars' engine for files on disk.
        progress: Whether rank 0 shows progress bars.
    """
    buckets = divide(given.rows, files.num_files, files.row_group_size, size)
    if files.seed is None:

        def rows_of(number: int) -> pl.DataFrame:
            return given.read(buckets[number].start, buckets[number].stop, columns.names(), size, engine)
    elif whole and ranks.world_size() == 1 and given.rows < 1 << 32:
        with ranks.progress_bar("read", given.rows, progress) as bar:
            rows = _read(given.share(size), columns.names(), engine, bar.update)
        order = _inverse(Permutation(given.rows, files.seed))

        def rows_of(number: int) -> pl.DataFrame:
            return rows[order[buckets[number].start : buckets[number].stop]]
    else:
        places = Places(buckets)
        spill = Spill(scratch, "shuffled", places.schema(columns), len(buckets))
        parts, permutation = given.share(size), Permutation(given.rows, files.seed)

        def placed(part: Part) -> Iterator[Placed]:
            yield places.of(part.read(columns.names(), engine), permutation.at(part.first, part.rows))

        with ranks.progress_bar("shuffle", sum(part.rows for part in parts), progress) as bar:
            spill.write(parts, placed, bar.update)
        ranks.barrier()

        def rows_of(number: int) -> pl.DataFrame:
            return places.ordered(spill.read(number))

    write_buckets(lambda number: apply(rows_of(number)), buckets, files, scratch, progress)


def write_buckets(
    rows_of: Callable[[int], pl.DataFrame], buckets: Sequence[Bucket], files: OutputFiles, scratch: Path, progress: bool
) -> None:
    """Write this rank's share of the files to ``scratch/whole``. `rows` returns the rows of a bucket, given its
    number."""
    mine = range(ranks.rank(), files.num_files, ranks.world_size())

    def write_file(file: int, progress: _Progress) -> None:
        frames = (rows_of(i) for i, bucket in enumerate(buckets) if bucket.file == file)
        _write(scratch / "whole" / files.names[file], frames, files, progress)

    with ranks.progress_bar("write", sum(b.stop - b.start for b in buckets if b.file in mine), progress) as bar:
        _in_threads(write_file, mine, bar.update)


def divide(rows: int, files: int, row_group_size: int, size: int) -> list[Bucket]:
    """Return the buckets of an output, in order.

    Args:
        rows: The number of rows of the output. The sizes of files differ by at most one row.
        row_group_size: The number of rows of a row group. A bucket ends where a row group ends.
        size: The largest number of rows of a bucket, at least one row group.
    """
    step = max(1, size // row_group_size) * row_group_size
    edges = [rows * file // files for file in range(files + 1)]
    return [
        Bucket(file, start, min(start + step, edges[file + 1]))
        for file in range(files)
        for start in range(edges[file], edges[file + 1], step)
    ]


class Places:
    """The positions of rows in an output: the bucket of each row, and in a further column its position in the bucket.

    Args:
        buckets: All buckets of the output.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._starts = np.array([bucket.start for bucket in buckets], dtype=np.uint64)

    def schema(self, columns: pl.Schema) -> pl.Schema:
        """Return the schema of rows with this column."""
        return pl.Schema({**columns, _POSITION: pl.UInt32()})

    def of(self, rows: pl.DataFrame, position: npt.NDArray[np.uint64]) -> Placed:
        """Return the bucket of each row, and its position in the bucket, given its position in the whole output."""
        bucket = np.searchsorted(self._starts, position, side="right") - 1
        inside = pl.Series(_POSITION, (position - self._starts[bucket]).astype(np.uint32))
        return Placed(rows.with_columns(inside), bucket)

    def ordered(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of a bucket in their final order."""
        order = np.empty(rows.height, dtype=np.uint32)
        order[rows[_POSITION].to_numpy()] = np.arange(rows.height, dtype=np.uint32)
        return rows.drop(_POSITION)[order]


class Placed(NamedTuple):
    """A frame of rows, and the number of each row's bucket."""

    rows: pl.DataFrame
    bucket: npt.NDArray[np.int64]


class Spill:
    """Rows of all ranks on disk, which are read bucket by bucket.

    Each rank writes Arrow IPC files. Each frame is written as one record batch per bucket.

    Args:
        folder: A folder that all ranks can reach.
        name: The beginning of the file names.
        schema: The schema of the rows.
        buckets: The number of buckets.
    """

    def __init__(self, folder: Path, name: str, schema: pl.Schema, buckets: int) -> None:
        self._folder, self._name, self._schema, self._buckets = folder, name, schema, buckets
        # Categories would be dictionaries, which cannot differ between the batches of an IPC file.
        self._kept = pl.Schema({name: plain(dtype) for name, dtype in schema.items()})

    def write(self, tasks: Sequence[_Task], placed: Callable[[_Task], Iterable[Placed]], progress: _Progress) -> None:
        """Write this rank's rows: the results of `placed` for some tasks, which run in parallel."""
        smallest = np.min_scalar_type(self._buckets)  # NumPy sorts 16 bits in linear time
        schema = _arrow(pl.DataFrame(schema=self._kept)).schema

        def write(worker: int, progress: _Progress) -> None:
            with pa.ipc.new_file(self._folder / f"{self._name}-{ranks.rank()}-{worker}.arrow", schema) as writer:
                for rows, bucket in itertools.chain.from_iterable(map(placed, tasks[worker::_THREADS])):
                    order = np.argsort(bucket.astype(smallest), kind="stable").astype(np.uint32)
                    (batch,) = _arrow(rows.cast(self._kept)[order].rechunk()).to_batches()
                    counts = np.bincount(bucket, minlength=self._buckets).tolist()
                    for first, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
                        writer.write_batch(batch.slice(first, count))
                    progress(rows.height)

        _in_threads(write, range(_THREADS), progress)

    def read(self, number: int) -> pl.DataFrame:
        """Read the rows of a bucket, in no particular order. All ranks must have finished writing."""
        batches: list[pa.RecordBatch] = []
        for path in self._folder.glob(f"{self._name}-*.arrow"):
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                every = range(number, reader.num_record_batches, self._buckets)
                batches += [reader.get_batch(i) for i in every]
        return pl.DataFrame(pl.from_arrow(pa.Table.from_batches(batches))).cast(self._schema)


def _read(parts: Sequence[Part], columns: Sequence[str], engine: Any, progress: _Progress) -> pl.DataFrame:
    """Read the rows of all parts."""
    frames = []
    for part in parts:
        frames.append(part.read(columns, engine))
        progress(part.rows)
    return pl.concat(frames, rechunk=True)


def _inverse(permutation: Permutation) -> npt.NDArray[np.uint32]:
    """Return the rows, sorted by their positions."""
    order = np.empty(permutation.rows, dtype=np.uint32)
    for first in range(0, len(order), _CHUNK):
        rows = np.arange(first, min(first + _CHUNK, len(order)), dtype=np.uint32)
        order[permutation.at(first, len(rows))] = rows
    return order


def _write(path: Path, frames: Iterable[pl.DataFrame], files: OutputFiles, progress: _Progress) -> None:
    """Write frames, one after the other, to a Parquet file."""
    with contextlib.ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for frame in frames:
            table = _arrow(frame)
            if writer is None:
                # Dictionaries make plain numbers, many of them different, larger and slower to write;
                # differences make integers smaller and faster.
                leaves = dict(_leaf(field.name, field.type) for field in table.schema)
                integers = [name for name, dtype in leaves.items() if pa.types.is_integer(dtype)]
                floats = [name for name, dtype in leaves.items() if pa.types.is_floating(dtype)]
                writer = stack.enter_context(
                    pq.ParquetWriter(
                        path,
                        table.schema,
                        compression=files.compression,
                        use_dictionary=list(leaves.keys() - {*integers, *floats}),
                        column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
                    )
                )
            writer.write_table(table, files.row_group_size)
            progress(table.num_rows)


def _in_threads(do: Callable[[int, _Progress], None], numbers: Iterable[int], progress: _Progress) -> None:
    """Call `do` with each number, and with a callback for its progress. The callback raises if another call has
    failed."""
    stop, one_at_a_time = threading.Event(), threading.Lock()

    def done(rows: int) -> None:
        if stop.is_set():
            raise CancelledError
        with one_at_a_time:
            progress(rows)

    with ThreadPoolExecutor(min(_THREADS, pl.thread_pool_size()), "nbdist etl") as pool:
        try:
            list(pool.map(lambda number: do(number, done), numbers))
        finally:
            stop.set()


def _arrow(frame: pl.DataFrame) -> pa.Table:
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _leaf(name: str, dtype: pa.DataType) -> tuple[str, pa.DataType]:
    """Return the name and the Parquet type of a column's values; for a column of lists, of the values in the lists."""
    return _leaf(f"{name}.list.element", dtype.value_type) if pa.types.is_large_list(dtype) else (name, dtype)


def plain(dtype: pl.DataType) -> pl.DataType:
    """Return a type with strings in place of categories, also in lists."""
    if isinstance(dtype, pl.List) and isinstance(dtype.inner, pl.DataType):
        return pl.List(plain(dtype.inner))
    return pl.String() if isinstance(dtype, (pl.Categorical, pl.Enum)) else dtype

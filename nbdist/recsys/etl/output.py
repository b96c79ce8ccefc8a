"""Rows that are larger than memory, written to Parquet files in a random order that only the seed decides."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from .. import ranks
from .inputs import Input, Part
from .permutation import Permutation

_POSITION = "position (nbdist)"  # of a row in its bucket
_THREADS = 2  # half of the work is not polars', and done on one core
_CHUNK = 1 << 16  # rows
_Progress = Callable[[int], object]
"""Called with a number of rows that are done."""
COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "brotli", "none")


@dataclass(frozen=True)
class OutputFiles:
    """What is written, and how."""

    count: int
    row_group_size: int
    """Rows per row group."""
    compression: str
    """One of `COMPRESSIONS`."""
    seed: int | None
    """What the order of the rows follows from. None: it is that of the input."""

    @property
    def names(self) -> list[str]:
        """Of the files, in order."""
        return [f"part-{number:05d}.parquet" for number in range(self.count)]


class _Bucket(NamedTuple):
    """Rows that come one after the other in an output file, few enough to be in memory together."""

    file: int
    start: int
    """Position in the whole output of the first of them."""
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
    """Write this rank's share of the files, to ``scratch/whole``; all ranks have to.

    Args:
        given: The rows.
        columns: Those that are needed.
        apply: What makes output rows of some input rows, in order.
        scratch: A folder, with ``whole`` in it, that all ranks see.
        size: Rows to have in memory at a time.
        whole: Whether all rows may be there as they are in the input, beside these.
        engine: Polars' engine for what is on disk.
        progress: Whether rank 0 shows bars.
    """
    buckets = divide(given.rows, files.count, files.row_group_size, size)
    if files.seed is None:

        def rows_of(number: int) -> pl.DataFrame:
            parts = given.parts(buckets[number].start, buckets[number].stop, size)
            return pl.concat(part.read(columns.names(), engine) for part in parts)
    elif whole and ranks.world_size() == 1 and given.rows < 1 << 32:
        with ranks.progress_bar("read", given.rows, progress) as bar:
            rows = _read(given.share(size), columns.names(), engine, bar.update)
        order = _inverse(Permutation(given.rows, files.seed))

        def rows_of(number: int) -> pl.DataFrame:
            return rows[order[buckets[number].start : buckets[number].stop]]
    else:
        spill = Spill(scratch, columns, buckets)
        parts = given.share(size)
        with ranks.progress_bar("shuffle", sum(part.rows for part in parts), progress) as bar:
            spill.write(parts, Permutation(given.rows, files.seed), engine, bar.update)
        ranks.barrier()
        rows_of = spill.read
    mine = range(ranks.rank(), files.count, ranks.world_size())

    def write_file(file: int, progress: _Progress) -> None:
        frames = (apply(rows_of(i)) for i, bucket in enumerate(buckets) if bucket.file == file)
        _write(scratch / "whole" / files.names[file], frames, files, progress)

    with ranks.progress_bar("write", sum(b.stop - b.start for b in buckets if b.file in mine), progress) as bar:
        _in_threads(write_file, mine, bar.update)


def divide(rows: int, files: int, row_group_size: int, size: int) -> list[_Bucket]:
    """The buckets of an output, in order.

    Args:
        rows: Of the output. OutputFiles have equally many, or one more or less.
        row_group_size: A bucket ends where a row group does.
        size: Rows that a bucket may have; one row group at least.
    """
    step = max(1, size // row_group_size) * row_group_size
    edges = [rows * file // files for file in range(files + 1)]
    return [
        _Bucket(file, start, min(start + step, edges[file + 1]))
        for file in range(files)
        for start in range(edges[file], edges[file + 1], step)
    ]


class Spill:
    """Rows of all ranks on disk, of which any bucket can be read.

    Each rank writes Arrow IPC files, with a record batch for each bucket out of each part of the input.

    Args:
        folder: Where; all ranks see it.
        schema: Of the rows.
        buckets: All of them.
    """

    def __init__(self, folder: Path, schema: pl.Schema, buckets: Sequence[_Bucket]) -> None:
        self._folder, self._schema, self._buckets = folder, schema, buckets
        # Categories would be dictionaries, which cannot differ between the batches of an IPC file.
        self._kept = pl.Schema({name: _plain(dtype) for name, dtype in schema.items()} | {_POSITION: pl.UInt32()})

    def write(self, parts: Sequence[Part], permutation: Permutation, engine: Any, progress: _Progress) -> None:
        """Write this rank's parts of the input, each row to the bucket that its place in the output is in."""
        starts = np.array([bucket.start for bucket in self._buckets], dtype=np.uint64)
        smallest = np.min_scalar_type(len(starts))  # NumPy sorts 16 bits in linear time
        schema = _arrow(pl.DataFrame(schema=self._kept)).schema

        def write(worker: int, progress: _Progress) -> None:
            with pa.ipc.new_file(self._folder / f"{ranks.rank()}-{worker}.arrow", schema) as writer:
                for part in parts[worker::_THREADS]:
                    rows = part.read(self._schema.names(), engine)
                    position = permutation.at(part.first, part.rows)
                    bucket = (np.searchsorted(starts, position, side="right") - 1).astype(smallest)
                    order = np.argsort(bucket, kind="stable").astype(np.uint32)
                    inside = pl.Series(_POSITION, (position - starts[bucket]).astype(np.uint32))
                    (batch,) = _arrow(rows.with_columns(inside).cast(self._kept)[order].rechunk()).to_batches()
                    counts = np.bincount(bucket, minlength=len(starts)).tolist()
                    for first, count in zip(itertools.accumulate(counts, initial=0), counts, strict=False):
                        writer.write_batch(batch.slice(first, count))
                    progress(part.rows)

        _in_threads(write, range(_THREADS), progress)

    def read(self, number: int) -> pl.DataFrame:
        """The rows of a bucket, in the order of the output; all ranks must have written."""
        batches: list[pa.RecordBatch] = []
        for path in self._folder.glob("*.arrow"):
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                every = range(number, reader.num_record_batches, len(self._buckets))
                batches += [reader.get_batch(i) for i in every]
        rows = pl.DataFrame(pl.from_arrow(pa.Table.from_batches(batches)))
        order = np.empty(rows.height, dtype=np.uint32)
        order[rows[_POSITION].to_numpy()] = np.arange(rows.height, dtype=np.uint32)
        return rows.drop(_POSITION)[order].cast(self._schema)


def _read(parts: Sequence[Part], columns: Sequence[str], engine: Any, progress: _Progress) -> pl.DataFrame:
    """The rows of all parts, in one piece."""
    frames = []
    for part in parts:
        frames.append(part.read(columns, engine))
        progress(part.rows)
    return pl.concat(frames, rechunk=True)


def _inverse(permutation: Permutation) -> npt.NDArray[np.uint32]:
    """The row at each position."""
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
                # Dictionaries make plain numbers, of which there are many different ones, larger and slower to write;
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
    """Call `do` with each number and what tells of its progress, which ends it when another one has failed."""
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
    """What Parquet calls a column, or the values in its lists; and their type."""
    return _leaf(f"{name}.list.element", dtype.value_type) if pa.types.is_large_list(dtype) else (name, dtype)


def _plain(dtype: pl.DataType) -> pl.DataType:
    if isinstance(dtype, pl.List) and isinstance(dtype.inner, pl.DataType):
        return pl.List(_plain(dtype.inner))
    return pl.String() if isinstance(dtype, (pl.Categorical, pl.Enum)) else dtype

"""The rows that a workflow reads, from Parquet files or frames: their schema, and the share of each rank."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import polars as pl
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from ...devices import collective_device
from .. import ranks
from ..io import remote
from ..io.frames import Tabular, frame_of
from ..io.inspection import NoRows, inspect
from ..io.row_groups import RowGroup, slice_groups
from ..io.storage import Found, Paths

_Slice: TypeAlias = Callable[[int, int], pl.LazyFrame]
"""The rows of a file, or a frame, given by the first row and the number of rows."""
_COPIES = 8  # of a part's rows that may be in memory at the same time, before and after the steps, in Arrow, sorted
_CHUNK = 1 << 26  # bytes that go to other machines at a time
Source: TypeAlias = Paths | Tabular
"""The source of rows: names of files, or any frame that `frame_of` takes."""


@dataclass(frozen=True)
class Reading:
    """Options for reading rows."""

    size: int
    """The number of rows in memory at a time."""
    engine: Any
    """The polars engine for files on disk."""
    progress: bool
    """True if rank 0 shows progress bars."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of an input."""

    slice: _Slice
    """The file or frame of the part, with its first row and its number of rows."""
    where: str
    start: int
    """The number of the first row of the part in this file or frame."""
    first: int
    """The number of the first row of the part in the whole input."""
    rows: int

    def scan(self) -> pl.LazyFrame:
        """Return the rows, in order, as a lazy frame."""
        return self.slice(self.start, self.rows)

    def collect(self, queries: Sequence[pl.LazyFrame], engine: Any) -> list[pl.DataFrame]:
        """Return the results of queries on `scan`. If the rows cannot be read, raise `ValueError` with the name of
        their file.
        """
        try:
            return pl.collect_all(queries, engine=engine)
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"{self}: {error}") from error

    def read(self, columns: Sequence[str], engine: Any) -> pl.DataFrame:
        """Read some columns of the rows, in order; raise `ValueError` if they cannot be read, or have changed."""
        (rows,) = self.collect([self.scan().select(columns)], engine)
        if rows.height != self.rows:
            raise ValueError(f"{self}: it had more rows when it was first read")
        return rows

    def __str__(self) -> str:
        return f"{self.where}, rows {self.start} to {self.start + self.rows - 1}"


class Input:
    """Rows in a known order, from files with one schema or from one frame.

    Attributes:
        schema: Names and types of the columns.
        rows: The number of rows, at least one.

    Raises:
        FileNotFoundError: A file does not exist.
        NoRows: There are no rows.
        ValueError: A file is not Parquet, or has a different schema than the first. The error names file and column.
    """

    def __init__(
        self,
        schema: pl.Schema,
        slices: Sequence[_Slice],
        names: Sequence[str],
        groups: Sequence[RowGroup],
    ) -> None:
        self.schema = schema
        self._slices, self._names = slices, names
        self._groups = [group for group in groups if group.rows]
        self.rows = sum(group.rows for group in groups)
        self.where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        if not self.rows:
            raise NoRows(f"{self.where}: no rows")

    @classmethod
    def of_frame(cls, frame: pl.DataFrame) -> Input:
        return cls(frame.schema, [frame.lazy().slice], ["the frame"], [RowGroup(0, 0, frame.height, 0)])

    @classmethod
    def of_files(cls, files: Paths) -> Input:
        found = inspect(files, _look)
        names = list(found.types)  # another file may have them in a different order
        slices: list[_Slice] = [frame.select(names).slice for frame in found.opened]
        types = dict(found.types)
        for column, values in found.partitions.items():
            literals = [remote.constant(value, values).alias(column) for value in values]
            types |= pl.select(literals[0]).schema
            slices = [_with_constant(*one) for one in zip(slices, literals, strict=True)]
        return cls(pl.Schema(types), slices, [str(path) for path in found.paths], found.groups)

    def derived(self, change: Callable[[pl.LazyFrame], pl.LazyFrame]) -> Input:
        """Apply `change` to the rows. It changes each row by itself, and keeps their order."""

        def changed(slice: _Slice) -> _Slice:
            return lambda start, rows: change(slice(start, rows))

        schema = change(pl.LazyFrame(schema=self.schema)).collect_schema()
        return Input(schema, [changed(slice) for slice in self._slices], self._names, self._groups)

    def numbered(self, name: str) -> Input:
        """Return the rows with their numbers, from 0 on, in a further int64 column."""

        def with_numbers(slice: _Slice, first: int) -> _Slice:
            def run(start: int, rows: int) -> pl.LazyFrame:
                frame = slice(start, rows).with_row_index(name)
                return frame.with_columns(pl.col(name).cast(pl.Int64) + (first + start))

            return run

        slices = [with_numbers(*one) for one in zip(self._slices, self._offsets(), strict=True)]
        return Input(pl.Schema({**self.schema, name: pl.Int64()}), slices, self._names, self._groups)

    def filtered(self, condition: pl.Expr, reading: Reading) -> Input:
        """Keep the rows for which a condition is true. All ranks must call it, because each counts the rows of its
        share.

        Raises:
            NoRows: The condition is true for no row.
        """
        condition = condition.fill_null(False)
        parts = self.parts(0, self.rows, reading.size)
        counts: dict[int, int] = {}
        mine = range(ranks.rank(), len(parts), ranks.world_size())
        with ranks.progress_bar("filter", sum(parts[i].rows for i in mine), reading.progress) as bar:
            for i in mine:
                (kept,) = parts[i].collect([parts[i].scan().select(condition.sum())], reading.engine)
                counts[i] = int(kept.item())
                bar.update(parts[i].rows)
        counts = {i: count for one in ranks.all_gather(counts) for i, count in one.items()}
        if not any(counts.values()):
            raise NoRows(f"{self.where}: Filter: {condition} is true for none of the {self.rows} rows")

        def kept_of(part: Part) -> _Slice:
            return lambda start, rows: part.scan().filter(condition).slice(start, rows)

        groups = [RowGroup(i, 0, counts[i], 0) for i in range(len(parts))]
        return Input(self.schema, [kept_of(part) for part in parts], [part.where for part in parts], groups)

    def with_columns(self, columns: Sequence[pl.Expr], shifts: Sequence[int]) -> Input:
        """Add columns that are computed from other rows. A shift of n refers to the row n places before; a negative
        shift, to a later row.
        """
        before, after = max(0, *shifts), max(0, *(-shift for shift in shifts))

        def more_of(offset: int) -> _Slice:
            def run(start: int, rows: int) -> pl.LazyFrame:
                first = offset + start
                low, high = max(0, first - before), min(self.rows, first + rows + after)
                frames = [part.scan() for part in self.parts(low, high, high - low)]
                return pl.concat(frames).with_columns(columns).slice(first - low, rows)

            return run

        slices = [more_of(offset) for offset in self._offsets()]
        schema = pl.LazyFrame(schema=self.schema).with_columns(columns).collect_schema()
        return Input(schema, slices, self._names, self._groups)

    def _offsets(self) -> list[int]:
        """Return the position of each file's first row in the input."""
        rows = [0] * len(self._slices)
        for group in self._groups:
            rows[group.file] += group.rows
        return [0, *itertools.accumulate(rows)][:-1]

    def head(self, columns: Sequence[str]) -> pl.DataFrame:
        """Read some columns of the first rows: at least one row, at most a thousand."""
        return self.parts(0, min(1000, self.rows), 1000)[0].read(columns, "streaming")

    def read(self, first: int, stop: int, columns: Sequence[str], size: int, engine: Any) -> pl.DataFrame:
        """Read some columns of the rows `first` to `stop` - 1, `size` rows at a time."""
        return pl.concat(part.read(columns, engine) for part in self.parts(first, stop, size))

    def share(self, size: int) -> list[Part]:
        """Yield the rows of this rank, in parts of at most `size` rows.

        The numbers of rows of the ranks differ by at most one, and each row belongs to one rank.
        """
        first, stop = (self.rows * rank // ranks.world_size() for rank in (ranks.rank(), ranks.rank() + 1))
        return self.parts(first, stop, size)

    def parts(self, first: int, stop: int, size: int) -> list[Part]:
        """Yield the rows `first` to `stop` - 1 in parts of at most `size` rows that end at row groups, if possible."""
        begins = [0]
        for group in self._groups:
            begins.append(begins[-1] + group.rows)
        offsets: dict[int, int] = {}  # of a file's first row in the input
        for begin, group in zip(begins, self._groups, strict=False):
            offsets.setdefault(group.file, begin)
        spans: list[tuple[int, int, int]] = []  # file, first and last + 1 row in the input
        for piece in slice_groups(self._groups, first, stop - first):
            rows = piece.stop - piece.start
            if spans and spans[-1][0] == piece.group.file and spans[-1][2] - spans[-1][1] + rows <= size:
                spans[-1] = (piece.group.file, spans[-1][1], first + rows)
            else:
                pieces = -(-rows // size)
                cuts = [first + rows * i // pieces for i in range(pieces + 1)]
                spans += [(piece.group.file, *pair) for pair in itertools.pairwise(cuts)]
            first += rows
        return [
            Part(self._slices[file], self._names[file], begin - offsets[file], begin, end - begin)
            for file, begin, end in spans
        ]


def _with_constant(slice: _Slice, literal: pl.Expr) -> _Slice:
    return lambda start, rows: slice(start, rows).with_columns(literal)


def row_bytes(frame: pl.DataFrame) -> int:
    """Bytes per row, at least 1."""
    return max(1, -(-int(frame.estimated_size()) // max(1, frame.height)))


def rows_in(memory_bytes: int, width: int) -> int:
    """Return the number of rows of `width` bytes to process at a time, so that they and their results fit into
    `memory_bytes`."""
    return max(1, memory_bytes // (_COPIES * width))


@contextlib.contextmanager
def opened(source: Source) -> Iterator[Input]:
    """Open the input of `source`: a frame of any kind that `frame_of` takes, or files. An input that is open already is
    yielded as it is.

    The rows of a lazy frame are in a temporary file until the input is closed.

    A lazy frame may not know its number of rows, and may return other rows the second time. So rank 0 computes it once,
    streamed to a Parquet file, and machines that cannot read this file get a copy.
    """
    if isinstance(source, Input):
        yield source
        return
    frame = frame_of(source, "the rows")
    if isinstance(frame, pl.DataFrame):
        yield Input.of_frame(frame)
    elif isinstance(frame, pl.LazyFrame):
        with contextlib.ExitStack() as stack:

            def write() -> str:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nbdist-"))
                path = os.path.join(folder, "frame.parquet")
                frame.sink_parquet(path, compression="lz4", row_group_size=1 << 17, maintain_order=True)
                if not pq.read_metadata(path).num_rows:  # on all ranks, before the file is removed
                    raise NoRows("the frame: no rows")
                return path

            yield Input.of_files(_on_every_machine(ranks.on_rank_0(write), stack))
            ranks.barrier()  # rank 0 takes it away
    else:
        files: Any = source
        yield Input.of_files(files)


def _on_every_machine(path: str, stack: contextlib.ExitStack) -> str:
    """Return the path of a file of rank 0, or of its copy on this rank's machine. The copies are removed with
    `stack`."""
    machine, sees = os.environ.get("NODE_RANK", "0"), os.path.exists(path)
    everyone = ranks.all_gather((machine, sees))
    # Machine → the first rank there that has to write a copy, for itself and its neighbours.
    writers = {name: rank for rank, (name, there) in reversed(list(enumerate(everyone))) if not there}
    if not writers:
        return path
    copy: str | None = None
    size, device = ranks.on_rank_0(lambda: os.path.getsize(path)), collective_device()
    with contextlib.ExitStack() as files:
        source = files.enter_context(open(path, "rb")) if ranks.rank() == 0 else None
        target: BinaryIO | None = None
        if writers.get(machine) == ranks.rank():
            copy = os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="nbdist-")), "frame.parquet")
            target = files.enter_context(open(copy, "wb"))
        for start in range(0, size, _CHUNK):
            chunk = torch.empty(min(_CHUNK, size - start), dtype=torch.uint8, device=device)
            if source is not None:
                chunk.copy_(torch.frombuffer(bytearray(source.read(len(chunk))), dtype=torch.uint8))
            dist.broadcast(chunk, src=0)
            if target is not None:
                target.write(chunk.cpu().numpy().tobytes())
    copies = ranks.all_gather(copy)
    return path if sees else str(copies[writers[machine]])


def _look(file: Found) -> tuple[pl.LazyFrame | remote.RemoteFile, pl.Schema, pq.FileMetaData]:
    """Read the columns and the footer of a Parquet file."""
    path = file.location
    if isinstance(path, str):
        there = remote.RemoteFile(path)
        return there, there.schema, there.footer
    footer = pq.read_metadata(path)
    frame = remote.scan(path)
    try:
        return frame, frame.collect_schema(), footer
    except pl.exceptions.PolarsError as error:
        raise OSError(str(error)) from error

"""The contract of a step: the columns that it needs and makes, learning, saving, and serving.

A new step is one file here with one class, its test, and the line that exports it; if a server can do it, also a
function in `triton/served/preprocess.py`. Workflows, saved files and exports find the class by its `kind`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import polars as pl

from ..kernels import Kernel
from ..vocabulary import Vocabulary, value_type

Stage: TypeAlias = Callable[[pl.LazyFrame], pl.LazyFrame]
"""A part of a lazy query."""
ROW = "row (nbdist)"
"""The number of a row in the input; no column of the user's."""
_FILE = re.compile(r"(table|vocabulary|learnt)-[a-z0-9-]+\.parquet")


@dataclass(frozen=True)
class State:
    """The learned state of a workflow: vocabularies by column, tables of `moments` by the kind of a step and a name,
    and fingerprints of the rows by a name."""

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    tables: dict[tuple[str, str], pl.DataFrame] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """The folder of a saved workflow, from which steps are restored."""

    folder: Path
    polars: str
    """The version that has written the expressions."""
    state: State
    """Filled by the steps, one after the other."""

    def table(self, name: str, columns: Mapping[str, pl.DataType | None] | None = None) -> pl.DataFrame:
        """Read one of the Parquet files.

        Args:
            name: The name of a file in the folder itself.
            columns: The columns that the file must have, with their types; the type None allows any type. None: any
                columns.

        Raises:
            ValueError: The name is a path, or the file is not a table with these columns.
        """
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise ValueError(f"the name of a table must be like table-0.parquet, got {name!r}")
        try:
            table = pl.read_parquet(read_file(self.folder / name))
        except BaseException as error:  # a panic of polars is no Exception
            if isinstance(error, OSError) or not (
                isinstance(error, Exception) or type(error).__name__ == "PanicException"
            ):
                raise
            raise ValueError(f"{name}: not a Parquet file that can be read: {error}") from error
        wanted = {one: table.schema.get(one) if dtype is None else dtype for one, dtype in (columns or {}).items()}
        if columns is not None and dict(table.schema) != wanted:
            raise ValueError(f"{name}: its columns must be {wanted}, got {dict(table.schema)}")
        return table


def read_file(path: Path) -> bytes:
    """Return the content of a file; raise `ValueError` for anything else, such as a pipe, which would block."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    return path.read_bytes()


class Query(NamedTuple):
    """A query on all training rows."""

    columns: Sequence[str]
    then: Stage
    """The query on these columns."""
    before: Step | None = None
    """The columns are taken as they are before this step. None: before the one that learns."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows that a step learns from; `etl/learning.py` reads them."""

    steps: Sequence[Step]
    """The steps before it that are applied whenever rows are read."""
    schema: pl.Schema
    """The columns before it."""
    where: str
    """The rows' source, for messages."""

    def read(self, what: str, queries: Sequence[Query]) -> Iterator[list[pl.DataFrame]]:
        """Return the answers to queries, for one part of this rank's rows after the other; `what` is the text of the
        bar."""
        raise NotImplementedError


class Step:
    """A step of a workflow. The object does not change in `fit`: learned values are in the workflow's `State`."""

    kind: str
    """The step's name in saved workflows."""
    kinds: ClassVar[dict[str, type[Step]]] = {}
    """Each class by its `kind`."""
    positional: ClassVar[str] = "columns"
    """The attribute with its positional arguments, from which a saved workflow makes it again;"""
    options: ClassVar[tuple[str, ...]] = ()
    """and those with its keyword arguments, which are called alike."""
    adds: Sequence[str] = ()
    """The columns that it adds or replaces."""
    learns: Collection[str] = ()
    """The names of what it learns; one step of a kind can learn each."""
    selects: bool = False
    """True for a step that only selects rows: it does nothing to a frame or a request, whose rows are all answered."""
    recognizes: Collection[str] = ()
    """The columns by which, with the columns it reads, it recognizes the rows that it was fitted to."""
    numbers_rows: bool = False
    """True where the step's result for the rows of `fit` depends on their numbers, the column `ROW`."""
    not_served: str = "made by a step that only polars can do"
    """Why a server cannot do it, if it cannot; said of a column that it makes."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            Step.kinds[cls.kind] = cls

    def reads(self, name: str) -> Collection[str]:
        """Return the columns from which it makes the column `name`."""
        return [name]

    def needs(self, wanted: set[str]) -> set[str]:
        """Return the columns that must exist before the step, so that `wanted` exist after it."""
        made = wanted.intersection(self.adds)
        return (wanted - made).union(*map(self.reads, made))

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        """Return the columns after the step, given the `schema` before it.

        Raises:
            ValueError: The step cannot be applied; the error begins with `where` and names the column.
        """
        raise NotImplementedError

    def _check_numbers(self, names: Sequence[str], schema: pl.Schema, where: str, booleans: bool = True) -> None:
        """Raise `ValueError` if columns do not exist, or are not numbers (or booleans)."""
        for name in names:
            require(name, schema, f"{where}: {type(self).__name__}")
            if not schema[name].is_numeric() and not (booleans and schema[name] == pl.Boolean()):
                raise ValueError(
                    f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: numbers are needed"
                )

    def _check_keys(self, names: Sequence[str], schema: pl.Schema, where: str) -> None:
        """Raise `ValueError` if columns do not exist, or are not integers, strings, booleans or categoricals."""
        for name in names:
            require(name, schema, f"{where}: {type(self).__name__}")
            if isinstance(schema[name], pl.List):
                raise ValueError(
                    f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: single values are needed"
                )
            value_type(schema[name], f"{where}: {type(self).__name__}: column {name!r}")

    def _check_new(self, schema: pl.Schema, where: str) -> None:
        """Raise `ValueError` if a column that it adds exists already."""
        for name in self.adds:
            if name in schema:
                raise ValueError(f"{where}: {type(self).__name__}: column {name!r} is in the rows already")

    def _expressions(self, schema: pl.Schema, names: Sequence[str], state: State) -> list[pl.Expr]:
        """Return expressions for some of its columns, given the schema, if expressions are enough."""
        raise NotImplementedError

    def apply(self, names: Sequence[str], state: State, training: bool) -> Stage:
        """Return the step as a part of a query that keeps the rows and their order.

        Args:
            names: The columns to make, some or all of `adds`.
            training: Whether the rows are those that the steps were fitted to.
        """
        return lambda frame: frame.with_columns(self._expressions(frame.collect_schema(), names, state))

    def learn(self, rows: TrainingRows, state: State, previous: State) -> None:
        """Learn from the rows of all ranks, and put the result into `state`; all ranks must call it.

        Args:
            previous: The state of the workflow that the fit goes on from; empty where there is none.
        """

    def check_growth(self, schema: pl.Schema, previous: State) -> None:
        """Raise `ValueError` if it cannot continue from the state of a previous workflow."""

    def check_training(self, names: Collection[str], rows: TrainingRows, state: State) -> None:
        """Raise `ValueError` if the step depends on the rows of `fit` in their order, and these rows differ.

        All ranks must call it.

        Args:
            names: The columns to make, some or all of `adds`.
        """

    def num_codes(self, name: str, before: int | None, state: State) -> int | None:
        """Return the number of codes in a column that it makes; None for other columns.

        Args:
            before: The number of codes that the column has before the step.
        """
        return None

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return the step for ``workflow.json``, without its kind; `number` is its position among the steps."""
        return {name: getattr(self, name) for name in (self.positional, *self.options)}

    def files(self, described: Mapping[str, Any], state: State) -> dict[str, pl.DataFrame]:
        """Return the tables that are saved with the result of `describe`, by file name."""
        return {}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Step:
        """Return the step with this description, and put its learned values into ``saved.state``."""
        make: Any = cls
        return make(*described[cls.positional], **{name: described[name] for name in cls.options})  # type: ignore[no-any-return]

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        """Return kernels for some of its columns.

        Raises:
            ValueError: No server can do it.
        """
        served = [step.__name__ for step in Step.kinds.values() if step.serve is not Step.serve]
        raise ValueError(
            f"column {names[0]!r} is {self.not_served}: compute it before the workflow, so that requests carry it, or "
            f"leave it out of columns=; or use a step that is served: {', '.join(served)}"
        )

    def __repr__(self) -> str:
        columns = getattr(self, self.positional)
        groups = [each if isinstance(each, str) else each[0] if len(each) == 1 else tuple(each) for each in columns]
        options = [f"{name}={getattr(self, name)!r}" for name in self.options]
        return f"{type(self).__name__}({', '.join([*map(repr, groups), *options])})"


def chained(stages: Sequence[Stage]) -> Stage:
    """Combine some parts of a query, one after the other, into one."""

    def run(frame: pl.LazyFrame) -> pl.LazyFrame:
        for stage in stages:
            frame = stage(frame)
        return frame

    return run


def type_name(dtype: pl.DataType) -> str:
    """Return the name of a type in a saved workflow: ``int64``, ``float32``, ``bool``, ``string``, ``list[string]``."""
    if isinstance(dtype, pl.List) and isinstance(dtype.inner, pl.DataType):
        return f"list[{type_name(dtype.inner)}]"
    if dtype.is_numeric() or dtype == pl.String:
        return str(dtype).lower()
    return "bool" if dtype == pl.Boolean else str(dtype)


def names_of(columns: str | Sequence[str]) -> list[str]:
    """Return names of columns; raise for an invalid name, a repeated one, or an empty list."""
    names = [columns] if isinstance(columns, str) else list(columns)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"columns are named by strings, and not by {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"column {name!r} is named twice")
    if not names:
        raise ValueError("no columns are named")
    return names


def require(name: str, columns: Any, where: str) -> None:
    """Raise `ValueError` if a column does not exist."""
    if name not in columns:
        raise ValueError(f"{where}: there is no column {name!r}, but {', '.join(map(repr, columns))}")


def require_integer(value: Any, what: str) -> int:
    """Return the value; raise `TypeError` if it is not an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    return value

"""The contract of a step: the columns that it needs and makes, learning, saving, and serving.

To add a step, write one file here with one class, its test, and the line that exports it. If a server can do the step,
add a function in `triton/served/preprocess.py`, too. Workflows, saved files and exports find the class by its `kind`.
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
"""The number of a row in the input. No column of the user's has this name."""
_FILE = re.compile(r"(table|vocabulary|learnt)-[a-z0-9-]+\.parquet")


@dataclass(frozen=True)
class State:
    """The learned state of a workflow: the vocabulary of each column, the tables of `moments` that each kind of step
    has learned, and the fingerprints of rows, each under a name.
    """

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    tables: dict[tuple[str, str], pl.DataFrame] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """The folder of a saved workflow, from which steps are restored."""

    folder: Path
    polars: str
    """The version of polars that has written the expressions."""
    state: State
    """The state, which the steps fill one after the other."""

    def table(self, name: str, columns: Mapping[str, pl.DataType | None] | None = None) -> pl.DataFrame:
        """Read one of the Parquet files.

        Args:
            name: The name of a file in the folder itself.
            columns: The columns that the file must have, with their types. The type None allows any type. None: any
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
    """Return the query on these columns."""
    before: Step | None = None
    """The columns are taken before this step. None: before the step that learns."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows that a step learns from, which `etl/learning.py` reads."""

    steps: Sequence[Step]
    """The earlier steps, which are applied whenever rows are read."""
    schema: pl.Schema
    """The columns before the step that learns."""
    where: str
    """The source of the rows, for messages."""

    def read(self, what: str, queries: Sequence[Query]) -> Iterator[list[pl.DataFrame]]:
        """Return the answers to the queries for each part of this rank's rows. `what` is the text of the progress
        bar."""
        raise NotImplementedError


class Step:
    """A step of a workflow. `fit` does not change the object: learned values are in the workflow's `State`."""

    kind: str
    """The step's name in saved workflows."""
    kinds: ClassVar[dict[str, type[Step]]] = {}
    """The classes of all steps, by `kind`."""
    positional: ClassVar[str] = "columns"
    """The attribute that holds the positional arguments, with which a saved workflow makes the step again;"""
    options: ClassVar[tuple[str, ...]] = ()
    """and the attributes that hold the keyword arguments of the same names."""
    adds: Sequence[str] = ()
    """The columns that the step adds or replaces."""
    learns: Collection[str] = ()
    """The names of the learned values. No two steps of a kind may have the same name."""
    selects: bool = False
    """True for a step that only removes rows. It does nothing to a frame or a request, because all of their rows are
    answered."""
    recognizes: Collection[str] = ()
    """The columns that the step, in addition to the columns that it reads, needs to recognize the rows that it was
    fitted to."""
    numbers_rows: bool = False
    """True if the result for the rows of `fit` depends on the numbers of the rows, the column `ROW`."""
    not_served: str = "made by a step that only polars can do"
    """The reason why a server cannot do the step, as a text about a column that the step makes; empty if it can."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            Step.kinds[cls.kind] = cls

    def reads(self, name: str) -> Collection[str]:
        """Return the columns from which the step makes the column `name`."""
        return [name]

    def needs(self, wanted: set[str]) -> set[str]:
        """Return the columns that must exist before the step to get the `wanted` columns after it."""
        made = wanted.intersection(self.adds)
        return (wanted - made).union(*map(self.reads, made))

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        """Return the columns after the step, given the `schema` before it.

        Raises:
            ValueError: The step cannot be applied; the error begins with `where` and names the column.
        """
        raise NotImplementedError

    def _check_numbers(self, names: Sequence[str], schema: pl.Schema, where: str, booleans: bool = True) -> None:
        """Raise `ValueError` if a column does not exist, or has values other than numbers and booleans."""
        for name in names:
            require(name, schema, f"{where}: {type(self).__name__}")
            if not schema[name].is_numeric() and not (booleans and schema[name] == pl.Boolean()):
                raise ValueError(
                    f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: numbers are needed"
                )

    def _check_keys(self, names: Sequence[str], schema: pl.Schema, where: str) -> None:
        """Raise `ValueError` if a column does not exist, or has values other than integers, strings, booleans and
        categoricals.
        """
        for name in names:
            require(name, schema, f"{where}: {type(self).__name__}")
            if isinstance(schema[name], pl.List):
                raise ValueError(
                    f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: single values are needed"
                )
            value_type(schema[name], f"{where}: {type(self).__name__}: column {name!r}")

    def _check_new(self, schema: pl.Schema, where: str) -> None:
        """Raise `ValueError` if a column that the step adds already exists."""
        for name in self.adds:
            if name in schema:
                raise ValueError(f"{where}: {type(self).__name__}: column {name!r} is in the rows already")

    def _expressions(self, schema: pl.Schema, names: Sequence[str], state: State) -> list[pl.Expr]:
        """Return expressions for some of the step's columns, given the schema, if expressions are enough."""
        raise NotImplementedError

    def apply(self, names: Sequence[str], state: State, training: bool) -> Stage:
        """Return the step as a part of a query that keeps the rows and their order.

        Args:
            names: The columns to make, some or all of `adds`.
            training: Whether these are the rows that the steps were fitted to.
        """
        return lambda frame: frame.with_columns(self._expressions(frame.collect_schema(), names, state))

    def learn(self, rows: TrainingRows, state: State, previous: State) -> None:
        """Learn from the rows of all ranks, and put the result into `state`; all ranks must call it.

        Args:
            previous: The state of the workflow that is continued; empty if there is none.
        """

    def check_growth(self, schema: pl.Schema, previous: State) -> None:
        """Raise `ValueError` if the step cannot continue from the state of a previous workflow."""

    def check_training(self, names: Collection[str], rows: TrainingRows, state: State) -> None:
        """Raise `ValueError` if the step depends on the rows of `fit` in their order, and these rows are different.

        All ranks must call it.

        Args:
            names: The columns to make, some or all of `adds`.
        """

    def num_codes(self, name: str, before: int | None, state: State) -> int | None:
        """Return the number of codes in a column that the step makes; None for other columns.

        Args:
            before: The number of codes that the column has before the step.
        """
        return None

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return the description of the step for ``workflow.json``, without its kind. `number` is its position among
        the steps."""
        return {name: getattr(self, name) for name in (self.positional, *self.options)}

    def files(self, described: Mapping[str, Any], state: State) -> dict[str, pl.DataFrame]:
        """Return the tables that belong to the result of `describe`, by file name."""
        return {}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Step:
        """Return the step with this description, and store its learned values in ``saved.state``."""
        make: Any = cls
        return make(*described[cls.positional], **{name: described[name] for name in cls.options})  # type: ignore[no-any-return]

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        """Return the kernels (operations of a server) for some of the step's columns.

        Raises:
            ValueError: No server can do the step.
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
    """Return the names of columns. Raises for an invalid name, a repeated name, or an empty list."""
    names = [columns] if isinstance(columns, str) else list(columns)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"columns are named by strings, and not by {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"column {name!r} is named twice")
    if not names:
        raise ValueError("no columns are named: give at least one")
    return names


def require(name: str, columns: Any, where: str) -> None:
    """Raise `ValueError` if a column does not exist."""
    if name not in columns:
        raise ValueError(f"{where}: there is no column {name!r}; the columns are {', '.join(map(repr, columns))}")


def require_integer(value: Any, what: str) -> int:
    """Return a value. Raises `TypeError` if it is not an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    return value

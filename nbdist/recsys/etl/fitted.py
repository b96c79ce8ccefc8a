"""What `Workflow.fit` learns, and the steps that learn numbers: their base, and where it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from .moments import COUNT, Aggregate
from .steps import Step, require
from .vocabulary import Vocabulary, value_type

ROW = "row (nbdist)"
"""The number of a row in the input; no column of the user's."""
FOLD = "fold (nbdist)"
"""The part of the training rows that a row is in."""


@dataclass(frozen=True)
class Learnt:
    """What has been learnt: the vocabularies by column; the tables of `moments` by the kind of a step and a name."""

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    tables: dict[tuple[str, str], pl.DataFrame] = field(default_factory=dict)


class FittedStep(Step):
    """A step that learns numbers from the training rows."""

    kind: str
    """What saved workflows call it."""
    columns: list[str]
    """Those whose numbers are learnt."""

    def aggregates(self) -> dict[str, Aggregate]:
        """What it learns: name → what is added up. The name is that of what it makes."""
        raise NotImplementedError

    def table(self, learnt: Learnt, name: str) -> pl.DataFrame:
        """What was learnt by that name."""
        return learnt.tables[self.kind, name]

    def require_value(self, name: str, table: pl.DataFrame, where: str) -> None:
        """Raise `ValueError` where there was no value to learn from."""
        column = self.aggregates()[name].column
        if column is not None and not int(table[COUNT].sum()):
            raise ValueError(
                f"{where}: {type(self).__name__}: column {column!r} has no value to learn from: each is null or NaN"
            )

    def _check_numbers(self, names: Sequence[str], schema: pl.Schema, where: str) -> None:
        for name in names:
            require(name, schema, f"{where}: {type(self).__name__}")
            if not schema[name].is_numeric() and schema[name] != pl.Boolean():
                raise ValueError(
                    f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: numbers are needed"
                )

    def _check_keys(self, names: Sequence[str], schema: pl.Schema, where: str) -> None:
        for name in names:
            require(name, schema, f"{where}: {type(self).__name__}")
            if isinstance(schema[name], pl.List):
                raise ValueError(
                    f"{where}: {type(self).__name__}: column {name!r} is {schema[name]}: single values are needed"
                )
            value_type(schema[name], f"{where}: {type(self).__name__}: column {name!r}")

    def _check_new(self, schema: pl.Schema, where: str) -> None:
        for name in self.adds:
            if name in schema:
                raise ValueError(f"{where}: {type(self).__name__}: column {name!r} is in the rows already")

"""Removal of columns."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from .step import Stage, State, Step, names_of, require


class Drop(Step):
    """Remove columns.

    Args:
        *columns: Names of columns.

    Raises:
        TypeError, ValueError: An argument is not a name, a name occurs twice, or there are no names.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Drop, Workflow
        >>> rows = pl.DataFrame({"user": [1], "timestamp": [881250949]})
        >>> Workflow(Drop("timestamp")).fit(rows).outputs
        {'user': 'int64'}
    """

    kind = "drop"

    def __init__(self, *columns: str) -> None:
        self.columns = names_of(columns)

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name in self.columns:
            require(name, schema, f"{where}: Drop")
        return pl.Schema({name: dtype for name, dtype in schema.items() if name not in self.columns})

    def apply(self, names: Sequence[str], state: State, training: bool) -> Stage:
        return lambda frame: frame.drop(self.columns, strict=False)

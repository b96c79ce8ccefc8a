"""Columns computed by polars expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from .. import expressions
from .step import Saved, State, Step, require


class Compute(Step):
    """Add or replace columns by polars expressions over a row: ``Compute(label=pl.col("rating") > 3)``.

    All expressions see the columns before the step.

    Args:
        **columns: The expressions, by the names of the new columns. They may not depend on other rows, be random, or
            contain Python functions; `Workflow.fit` checks this.

    Raises:
        TypeError, ValueError: The expression of a column is not of this kind. The error names the column.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Compute, Workflow
        >>> rows = pl.DataFrame({"rating": [5.0, 2.0]})
        >>> workflow = Workflow(Compute(label=pl.col("rating") > 3)).fit(rows)
        >>> workflow.transform(rows).collect().rows()
        [(5.0, True), (2.0, False)]
    """

    kind = "compute"
    not_served = "computed by a polars expression, which a server without polars cannot do"

    def __init__(self, **columns: pl.Expr) -> None:
        if not columns:
            raise ValueError("Compute: no columns")
        for name, expression in columns.items():
            expressions.check(expression, f"Compute: column {name!r}")
        self.columns = columns
        self.adds = list(columns)

    def reads(self, name: str) -> list[str]:
        return expressions.reads(self.columns[name])

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for name, expression in self.columns.items():
            for column in expressions.reads(expression):
                require(column, schema, f"{where}: Compute: column {name!r}")
            expressions.check_rows(expression, schema, f"{where}: Compute: column {name!r}")
        return pl.LazyFrame(schema=schema).with_columns(**self.columns).collect_schema()

    def _expressions(self, schema: pl.Schema, names: Sequence[str], state: State) -> list[pl.Expr]:
        return [self.columns[name].alias(name) for name in names]

    def describe(self, number: int, state: State) -> dict[str, Any]:
        """Return `columns`: {column: {reads, expression}}: the columns that the expression reads, and polars' JSON of
        it."""
        columns = {
            name: {"reads": self.reads(name), "expression": expressions.to_json(one, f"Compute: column {name!r}")}
            for name, one in self.columns.items()
        }
        return {"columns": columns}

    @classmethod
    def restore(cls, described: Mapping[str, Any], saved: Saved) -> Compute:
        columns = described["columns"].items()
        return cls(**{n: expressions.from_json(one["expression"], f"column {n!r}", saved.polars) for n, one in columns})

    def __repr__(self) -> str:
        return f"Compute({', '.join(f'{name}={expression}' for name, expression in self.columns.items())})"

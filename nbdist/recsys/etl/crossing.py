"""Several columns as one: a code for each combination of their values, by a hash."""

from __future__ import annotations

from functools import reduce

import polars as pl

from .hashing import combined, hashed
from .steps import Step, names_of, require
from .vocabulary import value_type


class HashedCross(Step):
    """Add a column of codes of combinations, such as of genre and age group, which a table then has rows for.

    Code 0 where any of the values is null, otherwise one of 1 to `num_buckets`, by a hash that is the same everywhere:
    combinations may share one. A table of the codes has ``num_buckets + 1`` rows. It needs no `fit`, and is served.

    Args:
        *columns: Two or more, of integers, strings, booleans or categoricals.
        name: The new column.
        num_buckets: How many codes there are for combinations.

    Raises:
        TypeError, ValueError: for arguments that make no sense.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import HashedCross, Workflow
        >>> rows = pl.DataFrame({"genre": ["war", "war", None], "age": [18, 18, 18]})
        >>> workflow = Workflow(HashedCross("genre", "age", name="both", num_buckets=100)).fit(rows)
        >>> codes = workflow.lazy(rows).collect()["both"]
        >>> bool(codes[0] == codes[1]), 1 <= codes[0] <= 100, codes[2]
        (True, True, 0)
    """

    def __init__(self, *columns: str, name: str, num_buckets: int) -> None:
        self.columns = names_of(columns)
        if len(self.columns) < 2:
            raise ValueError(f"HashedCross: {self.columns}: two columns or more are needed")
        if num_buckets < 1:
            raise ValueError(f"HashedCross: num_buckets={num_buckets}: at least 1")
        self.name, self.num_buckets = names_of(name)[0], num_buckets
        self.adds = [self.name]

    def needs(self, wanted: set[str]) -> set[str]:
        return (wanted - {self.name}).union(self.columns) if self.name in wanted else wanted

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        for column in self.columns:
            require(column, schema, f"{where}: HashedCross")
            if isinstance(schema[column], pl.List):
                raise ValueError(
                    f"{where}: HashedCross: column {column!r} is {schema[column]}: single values are needed"
                )
            value_type(schema[column], f"{where}: HashedCross: column {column!r}")
        return pl.Schema({**schema, self.name: pl.Int64()})

    def expression(self, schema: pl.Schema) -> pl.Expr:
        """The new column, of columns of that schema."""
        types = {column: value_type(schema[column], "HashedCross") for column in self.columns}
        hashes = [hashed(pl.col(column).cast(dtype), dtype) for column, dtype in types.items()]
        code = (reduce(combined, hashes) % self.num_buckets).cast(pl.Int64) + 1
        return pl.when(pl.any_horizontal(pl.col(self.columns).is_null())).then(0).otherwise(code).alias(self.name)

    def __repr__(self) -> str:
        columns = ", ".join(map(repr, self.columns))
        return f"HashedCross({columns}, name={self.name!r}, num_buckets={self.num_buckets})"

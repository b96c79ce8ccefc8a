"""Several columns as one: a code for each combination of their values, computed by a hash."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from ..hashing import combined, hashed
from ..kernels import Kernel
from ..vocabulary import value_type
from .step import Stage, State, Step, names_of


class HashedCross(Step):
    """Add a column with codes of combinations, such as of genre and age group, for which a table can have rows.

    The code is 0 if any of the values is null, otherwise 1 to `num_buckets`, by a hash that is equal on all machines:
    combinations may share a code. A table of the codes has ``num_buckets + 1`` rows. The step needs no `fit`, and can
    be served.

    Args:
        *columns: Two or more columns of integers, strings, booleans or categoricals.
        name: The name of the new column.
        num_buckets: The number of codes for combinations.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import HashedCross, Workflow
        >>> rows = pl.DataFrame({"genre": ["war", "war", None], "age": [18, 18, 18]})
        >>> workflow = Workflow(HashedCross("genre", "age", name="both", num_buckets=100)).fit(rows)
        >>> codes = workflow.transform(rows).collect()["both"]
        >>> bool(codes[0] == codes[1]), 1 <= codes[0] <= 100, codes[2]
        (True, True, 0)
    """

    kind = "hashed_cross"
    options = ("name", "num_buckets")

    def __init__(self, *columns: str, name: str, num_buckets: int) -> None:
        self.columns = names_of(columns)
        if len(self.columns) < 2:
            raise ValueError(f"HashedCross: {self.columns}: two columns or more are needed")
        if num_buckets < 1:
            raise ValueError(f"HashedCross: `num_buckets` must be at least 1, got {num_buckets}")
        self.name, self.num_buckets = names_of(name)[0], num_buckets
        self.adds = [self.name]

    def reads(self, name: str) -> list[str]:
        return self.columns

    def check(self, schema: pl.Schema, where: str) -> pl.Schema:
        self._check_keys(self.columns, schema, where)
        return pl.Schema({**schema, self.name: pl.Int64()})

    def apply(self, names: Sequence[str], state: State, training: bool) -> Stage:
        so_far, other = f"{self.name} (hash, nbdist)", f"{self.name} (other hash, nbdist)"
        missing = pl.any_horizontal(pl.col(self.columns).is_null())
        code = (pl.col(so_far) % self.num_buckets).cast(pl.Int64) + 1

        def run(frame: pl.LazyFrame) -> pl.LazyFrame:
            schema = frame.collect_schema()
            types = {column: value_type(schema[column], "HashedCross") for column in self.columns}
            first, *others = (hashed(pl.col(column).cast(dtype), dtype) for column, dtype in types.items())
            frame = frame.with_columns(first.alias(so_far))
            for one in others:  # a column each time: a hash as an expression is eight times as large as what it is of
                frame = frame.with_columns(one.alias(other))
                frame = frame.with_columns(combined(pl.col(so_far), pl.col(other)).alias(so_far))
            codes = pl.when(missing).then(0).otherwise(code)
            return frame.with_columns(codes.alias(self.name)).drop(so_far, other)

        return run

    def num_codes(self, name: str, before: int | None, state: State) -> int:
        return self.num_buckets + 1

    def serve(self, names: Sequence[str], state: State) -> list[Kernel]:
        return [Kernel("hashed_cross", self.columns, [self.name], {"num_buckets": self.num_buckets})]

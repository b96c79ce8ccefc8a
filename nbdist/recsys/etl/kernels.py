"""Steps for the server as plain data: a call of a function in `triton/served/preprocess.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl


@dataclass(frozen=True)
class Kernel:
    """A step of the server: columns of a request that are replaced or added."""

    kind: str
    """The name of a function or class in `triton/served/preprocess.py`."""
    takes: Sequence[str]
    makes: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments of the function that are plain JSON;"""
    arrays: Mapping[str, Sequence[pl.Series]] = field(default_factory=dict)
    """and the arguments that are lists of columns of any length, such as a vocabulary."""


def lookup(
    on: Sequence[str], keys: pl.DataFrame, columns: pl.DataFrame, defaults: Mapping[str, float] | None = None
) -> Kernel:
    """Add columns of a table: each row of a request gets the values of the table's row with the same key.

    Args:
        on: The columns of a request that are the key.
        keys: The columns of the table that are the key, in the same order; each key occurs once.
        columns: The columns to add.
        defaults: The values for a key that the table lacks. None: nulls.
    """
    last = {name: [None if defaults is None else defaults[name]] for name in columns.columns}
    every = pl.concat([columns, pl.DataFrame(last, schema=columns.schema)]).get_columns()
    named = [key.alias(name) for name, key in zip(on, keys.get_columns(), strict=True)]
    return Kernel("Lookup", on, columns.columns, arrays={"keys": named, "columns": every})

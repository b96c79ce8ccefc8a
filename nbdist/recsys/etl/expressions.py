"""Polars expressions as JSON: a file keeps them, and reading it runs no code in it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import polars as pl

from .expression_nodes import NODES, RANDOM, SELECTING


def check(expression: Any, where: str) -> None:
    """Raise for an object that is not an expression with one column, or that cannot be written as JSON.

    Raises:
        TypeError: The value is not an expression.
        ValueError: The expression has Python functions in it, is random, or names its columns by a pattern.
    """
    if not isinstance(expression, pl.Expr):
        raise TypeError(f"{where}: {expression!r} is a {type(expression).__name__}, not a polars expression")
    nodes = [node for node in _nodes(to_json(expression, where)) if isinstance(node, dict)]
    if any(RANDOM & node.keys() for node in nodes):
        raise ValueError(f"{where}: {expression} is random: its result would differ each time")
    if any(SELECTING & node.keys() for node in nodes) or expression.meta.has_multiple_outputs():
        raise ValueError(f"{where}: {expression} names its columns by a pattern: name each of them")


def check_rows(expression: pl.Expr, schema: pl.Schema, where: str) -> None:
    """Raise `ValueError` if an expression over columns of this schema cannot be computed, or not row by row.

    The same holds for an expression whose result differs between processes.

    The check uses polars' optimizer, which moves a selection of rows before an expression only if that does not change
    its values. (`Expr.meta.is_row_separable` cannot be used: in polars 2.1 it is true for ``x - x.mean()``.)
    """
    if any(_gives_physical(node, schema) for node in _nodes(to_json(expression, where))):
        raise ValueError(
            f"{where}: {expression} uses the physical numbers of a Categorical, which differ between processes: use "
            "the codes of Categorify, or an Enum, whose numbers are fixed"
        )
    frame = pl.LazyFrame(schema=schema).with_columns(expression.alias("it"))
    try:
        if frame.slice(1, 1).explain().startswith("SLICE"):
            raise ValueError(
                f"{where}: {expression} is not computed row by row: rows are read some at a time and by several ranks, "
                "so that its result would differ each time"
            )
        frame.collect()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{where}: {error}") from error


def reads(expression: pl.Expr) -> list[str]:
    """Return the columns that an expression reads, each once."""
    return sorted({*expression.meta.root_names()} - {""})  # as which polars 1.35 counts pl.element()


def to_json(expression: pl.Expr, where: str) -> Any:
    """Return polars' own JSON of an expression, as plain data. Raises `ValueError` for one with Python functions."""
    try:
        data = json.loads(expression.meta.serialize(format="json"))
        unknown = _unknown(data)
    except (pl.exceptions.PolarsError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: {expression} cannot be written as JSON: {error}") from error
    if unknown:
        raise ValueError(
            f"{where}: {expression} has a Python function in it, or something else that nbdist does not save "
            f"({unknown}): no open format can hold a function and no server can run it. Use other polars expressions"
        )
    return data


def from_json(data: Any, where: str, version: str) -> pl.Expr:
    """Return the expression from the `data` of `to_json`.

    Polars would unpickle, and so run, Python functions in the JSON, and load libraries that it names. So data with any
    node that is not in `NODES` are refused before polars reads them.

    Args:
        version: The version of polars that has made `data`, for the message.
    """
    unknown = _unknown(data)
    if unknown:
        raise ValueError(
            f"{where}: the expression was written by polars {version} and has the node {unknown}, which nbdist does "
            "not load: it may hold code"
        )
    try:
        return pl.Expr.deserialize(io.StringIO(json.dumps(data)), format="json")
    except BaseException as error:  # a panic of polars is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(
            f"{where}: the expression was written by polars {version} and cannot be read by polars {pl.__version__}: "
            f"{error}"
        ) from error


def _gives_physical(node: Any, schema: pl.Schema) -> bool:
    """Return whether a node of an expression's JSON makes numbers of categoricals, which polars numbers in order of
    appearance."""
    if not isinstance(node, dict) or node.get("function") != "ToPhysical":
        return False
    try:
        operand = pl.Expr.deserialize(io.StringIO(json.dumps(node["input"][0])), format="json")
        (dtype,) = pl.LazyFrame(schema=schema).select(operand).collect_schema().dtypes()
    except pl.exceptions.PolarsError:  # an element of a list, say, is unknown here
        return True
    return _has_categories(dtype)


def _has_categories(dtype: Any) -> bool:
    if isinstance(dtype, pl.Struct):
        return any(_has_categories(field.dtype) for field in dtype.fields)
    return _has_categories(dtype.inner) if isinstance(dtype, (pl.List, pl.Array)) else dtype == pl.Categorical


def _unknown(data: Any) -> str:
    """Return the first node in plain data that is not in `NODES`; "" if there is none."""
    names = (str(name) for node in _nodes(data) if isinstance(node, dict) for name in node)
    return next((repr(name) for name in names if name not in NODES and not name[:1].islower()), "")


def _nodes(data: Any) -> Iterator[Any]:
    """Yield all dicts and lists in plain data."""
    if isinstance(data, (dict, list)):
        yield data
        for item in data.values() if isinstance(data, dict) else data:
            yield from _nodes(item)

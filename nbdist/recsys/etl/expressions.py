"""Polars expressions as JSON: what can be kept in a file and read from one without running code that is in it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import polars as pl

_CODE = {"AnonymousFunction", "AnonymousAgg", "FfiPlugin", "RenameAlias", "callback", "SubPlan", "PythonScan"}
_RANDOM = {"Random", "Sample"}
_ARROW_MARK = [255] * 4
_LEAST = 8  # bytes that a pickle which names a function takes at the very least


def check(expression: Any, where: str) -> None:
    """Raise for what is no expression that gives one column and can be written as JSON.

    Raises:
        TypeError: It is not an expression.
        ValueError: It has Python functions in it, is random, or names its columns by a pattern.
    """
    if not isinstance(expression, pl.Expr):
        raise TypeError(f"{where}: {expression!r} is a {type(expression).__name__}, not a polars expression")
    nodes = [node for node in _nodes(to_json(expression, where)) if isinstance(node, dict)]
    if any(_RANDOM & node.keys() for node in nodes):
        raise ValueError(f"{where}: {expression} is random: it would be something else each time")
    if any("Selector" in node for node in nodes) or expression.meta.has_multiple_outputs():
        raise ValueError(f"{where}: {expression} names its columns by a pattern: name each of them")


def check_rows(expression: pl.Expr, schema: pl.Schema, where: str) -> None:
    """Raise `ValueError` where an expression over columns of that schema cannot be computed, or not row by row.

    Or where it is something else in each process.

    Polars moves the choice of some rows to before the expression only if that makes no difference to them. (What
    `Expr.meta.is_row_separable` says cannot be used: in polars 2.1 it is true of ``x - x.mean()``.)
    """
    if any(_gives_physical(node, schema) for node in _nodes(to_json(expression, where))):
        raise ValueError(
            f"{where}: {expression} takes the physical numbers of a Categorical, which are others in each process: "
            "Categorify gives codes that stay, and an Enum has physical numbers that do"
        )
    frame = pl.LazyFrame(schema=schema).with_columns(expression.alias("it"))
    try:
        if frame.slice(1, 1).explain().startswith("SLICE"):
            raise ValueError(
                f"{where}: {expression} is not computed row by row: rows are read some at a time and by several ranks, "
                "so that it would be something else each time"
            )
        frame.collect()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{where}: {error}") from error


def reads(expression: pl.Expr) -> list[str]:
    """The columns that an expression is computed from, each once."""
    return sorted({*expression.meta.root_names()} - {""})  # as which polars 1.35 counts pl.element()


def to_json(expression: pl.Expr, where: str) -> Any:
    """Polars' own JSON of an expression, as plain data. Raises `ValueError` for one with Python functions in it."""
    try:
        data = json.loads(expression.meta.serialize(format="json"))
    except (pl.exceptions.PolarsError, json.JSONDecodeError) as error:
        raise ValueError(f"{where}: {expression} cannot be written as JSON: {error}") from error
    if _has_code(data):
        raise ValueError(
            f"{where}: {expression} has a Python function in it, which no open format can hold and no server run: say "
            "it in polars' own expressions"
        )
    return data


def from_json(data: Any, where: str, version: str) -> pl.Expr:
    """The expression that `to_json` has made `data` of.

    Polars would unpickle, and so run, what the JSON holds of Python functions: such data is refused.

    Args:
        version: Of polars, that `data` was made by; for the message.
    """
    if _has_code(data):
        raise ValueError(f"{where}: the expression holds code, which nbdist never writes: the file is not trusted")
    try:
        return pl.Expr.deserialize(io.StringIO(json.dumps(data)), format="json")
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise ValueError(
            f"{where}: the expression was written by polars {version} and cannot be read by polars {pl.__version__}: "
            f"{error}"
        ) from error


def _gives_physical(node: Any, schema: pl.Schema) -> bool:
    """Return whether a node of an expression's JSON makes numbers of categoricals: polars numbers them as they come."""
    if not isinstance(node, dict) or node.get("function") != "ToPhysical":
        return False
    try:
        operand = pl.Expr.deserialize(io.StringIO(json.dumps(node["input"][0])), format="json")
        (dtype,) = pl.LazyFrame(schema=schema).select(operand).collect_schema().dtypes()
    except pl.exceptions.PolarsError:  # an element of a list, say, of which nothing is known here
        return True
    return _has_categories(dtype)


def _has_categories(dtype: Any) -> bool:
    if isinstance(dtype, pl.Struct):
        return any(_has_categories(field.dtype) for field in dtype.fields)
    return _has_categories(dtype.inner) if isinstance(dtype, (pl.List, pl.Array)) else dtype == pl.Categorical


def _has_code(data: Any) -> bool:
    return any(_CODE & node.keys() if isinstance(node, dict) else _is_opaque(node) for node in _nodes(data))


def _is_opaque(items: list[Any]) -> bool:
    """Return whether a list is bytes, but not the bytes of an Arrow array, in which polars writes lists of values."""
    return (
        len(items) >= _LEAST
        and items[: len(_ARROW_MARK)] != _ARROW_MARK
        and all(type(item) is int and 0 <= item <= 255 for item in items)
    )


def _nodes(data: Any) -> Iterator[Any]:
    """All dicts and lists in plain data, but for the bytes of a literal, which polars takes for nothing else."""
    if isinstance(data, (dict, list)):
        yield data
        if _is_bytes_literal(data):
            return
        for item in data.values() if isinstance(data, dict) else data:
            yield from _nodes(item)


def _is_bytes_literal(data: Any) -> bool:
    """Return whether plain data is ``{"Literal": {"Scalar": {"Binary": [...]}}}``."""
    for key in ("Literal", "Scalar", "Binary"):
        if not isinstance(data, dict) or data.keys() != {key}:
            return False
        data = data[key]
    return isinstance(data, list) and all(type(item) is int for item in data)

"""Rows whose columns have different types than in `fit`, but the same meaning, such as ids that were int32 and are
int64 now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import polars as pl

from .inputs import Input
from .ops.step import type_name

_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
_TYPES: dict[str, pl.DataType] = {
    type_name(dtype()): dtype() for dtype in (*_INTEGERS, pl.Float32, pl.Float64, pl.String, pl.Boolean)
}
_DATETIME = re.compile(r"Datetime\(time_unit='(ms|us|ns)', time_zone=(?:None|'(.+)')\)")


def as_in_fit(given: Input, needs: Mapping[str, str]) -> Input:
    """Return rows whose columns have the types of the rows of `fit`, as far as `casts` casts them. Raises the
    `ValueError` of `casts`."""
    types = casts(given.schema, needs, given.where)
    return given.derived(lambda frame: frame.with_columns(types)) if types else given


def casts(schema: pl.Schema, needs: Mapping[str, str], where: str) -> list[pl.Expr]:
    """Return the casts of columns that steps need to treat the rows like the rows of `fit`.

    Integers that may not fit into the type of `fit` are not cast: an id that is too large is an unknown one. Floats may
    stand for integers, as in pandas for a column with missing integers, 0 and 1 for booleans, and datetimes at midnight
    for dates; NaN is null then.

    Args:
        schema: The schema of the rows.
        needs: The columns that are needed, and the names of their types in `fit`.
        where: The start of error messages.

    Raises:
        ValueError: A column is missing, or its type cannot replace the type in `fit`; or, when the rows are read, the
            type in `fit` has no such value: a float that is not whole, or 2 for a boolean. The error names the column.
    """
    found = []
    for name, kind in needs.items():
        if name not in schema:
            raise ValueError(f"{where}: there is no column {name!r}; the columns are {', '.join(map(repr, schema))}")
        dtype = schema[name]
        if type_name(dtype) == kind:
            continue
        cast = _cast(dtype, kind)
        if cast is None:
            raise ValueError(f"{where}: column {name!r} is {type_name(dtype)}, but it was {kind} in fit")
        if (dtype.is_float() and cast.is_integer()) or (dtype != cast and cast in (pl.Boolean(), pl.Date())):
            found.append(pl.col(name).map_batches(_exact(where, cast), return_dtype=cast, is_elementwise=True))
        elif cast != dtype:
            found.append(pl.col(name).cast(cast))
    return found


def _exact(where: str, kind: pl.DataType) -> Callable[[pl.Series], pl.Series]:
    def cast(values: pl.Series) -> pl.Series:
        values = values.fill_nan(None) if values.dtype.is_float() else values
        found = values.cast(kind, strict=False)
        wrong = (found.cast(values.dtype) != values).fill_null(found.is_null() & values.is_not_null())
        if wrong.any():
            raise ValueError(
                f"{where}: column {values.name!r} has {values.filter(wrong)[0]}, but it was {type_name(kind)} in fit"
            )
        return found

    return cast


def declared(frame: pl.LazyFrame, outputs: Mapping[str, str], columns: Collection[str]) -> pl.LazyFrame:
    """Cast the integers of a frame to the types in a fitted workflow's `outputs`."""
    schema = frame.collect_schema()
    types = {name: type_of(outputs[name]) for name in columns}
    return frame.cast({name: dtype for name, dtype in types.items() if dtype is not None and dtype != schema[name]})


def type_of(kind: str) -> pl.DataType | None:
    """Return the type with this name; None for other types than numbers, strings, booleans and lists of them."""
    if kind.startswith("list["):
        inner = type_of(kind[len("list[") : -1])
        return None if inner is None else pl.List(inner)
    return _TYPES.get(kind)


def _cast(dtype: pl.DataType, kind: str) -> pl.DataType | None:
    """Return the type to which a column of type `dtype` must be cast, or `dtype` if no cast is needed; None if this
    type cannot replace the type in `fit`.
    """
    if isinstance(dtype, pl.List) and kind.startswith("list[") and isinstance(dtype.inner, pl.DataType):
        inner = _cast(dtype.inner, kind[len("list[") : -1])
        return None if inner is None else pl.List(inner)
    fitted = type_of(kind)
    if dtype == pl.Null():
        return fitted
    if fitted is not None and dtype.is_integer() and fitted.is_integer():
        return fitted if _fits(dtype, fitted) else dtype
    if fitted is not None and dtype.is_numeric() and (fitted.is_float() or (dtype.is_float() and fitted.is_integer())):
        return fitted
    if pl.Boolean() in (dtype, fitted) and all(one is not None and _is_plain(one) for one in (dtype, fitted)):
        return fitted
    if isinstance(dtype, (pl.Categorical, pl.Enum)):
        return fitted if kind == "string" else dtype if kind.startswith(("Categorical", "Enum")) else None
    if dtype == pl.String() and kind.startswith("Categorical"):
        return pl.Categorical()
    if isinstance(dtype, pl.Datetime) and dtype.time_zone is None and kind == "Date":
        return pl.Date()
    unit = _DATETIME.fullmatch(kind)
    if unit and unit[2] is None and dtype == pl.Date():
        return pl.Datetime(unit[1])  # type: ignore[arg-type]
    if unit and isinstance(dtype, pl.Datetime) and (dtype.time_zone is None) == (unit[2] is None):
        return pl.Datetime(unit[1], unit[2])  # type: ignore[arg-type]
    return None


def _is_plain(dtype: pl.DataType) -> bool:
    return dtype.is_integer() or dtype.is_float() or dtype == pl.Boolean()


def _fits(dtype: pl.DataType, other: pl.DataType) -> bool:
    """Return whether the integer type `other` has all values of the integer type `dtype`."""
    (signed, bits), (other_signed, other_bits) = (_sign_and_bits(one) for one in (dtype, other))
    return bits <= other_bits if signed == other_signed else other_signed and bits < other_bits


def _sign_and_bits(dtype: pl.DataType) -> tuple[bool, int]:
    return dtype.is_signed_integer(), int("".join(filter(str.isdigit, str(dtype))))

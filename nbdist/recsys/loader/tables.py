"""Tensors from rows in memory: Arrow tables, polars and pandas frames, arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from .columns import Column, Columns, Ragged


def to_table(data: Any) -> Columns:
    """Return the columns of any input of `MemoryLoader`."""
    if hasattr(data, "sink_parquet"):  # a lazy frame of polars
        data = data.collect()
    if isinstance(data, (tuple, list)):
        data = {str(i): column for i, column in enumerate(data)}
    if isinstance(data, Mapping):
        columns = {str(name): _column(name, column) for name, column in data.items()}
    elif isinstance(data, (pa.Table, pa.RecordBatch)):
        data = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
        columns = to_columns(data, "the table")
    elif hasattr(data, "to_arrow"):  # polars, which need not be imported to know its frames
        columns = {name: _column(name, data[name], "the frame") for name in data.columns}
    elif hasattr(data, "to_numpy") and hasattr(data, "columns"):  # pandas
        columns = {}
        if not data.columns.is_unique:
            raise ValueError(f"columns {list(data.columns[data.columns.duplicated()])} occur twice")
        for name in data.columns:
            # Not all through Arrow: it takes NaN for null.
            numeric = getattr(data[name].dtype, "kind", "O") in "biuf" and isinstance(data[name].dtype, np.dtype)
            columns[str(name)] = _column(name, data[name].to_numpy() if numeric else data[name], "the frame")
    elif hasattr(data, "__arrow_c_stream__"):
        columns = to_columns(pa.table(data), "the stream")
    else:
        raise TypeError(f"no batches can be made of a {type(data).__name__}: give tensors, arrays or a frame")
    if not columns:
        raise ValueError("no columns")
    return columns


def _column(name: Any, column: Any, where: str = "the dict") -> Column:
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        possible = column.flags.writeable and min(column.strides, default=0) >= 0
        column = torch.from_numpy(column if possible else column.copy())
    if isinstance(column, torch.Tensor) and column.ndim:
        # Columns of a pandas frame as one array: rows that lie scattered take 5 to 40 times as long to gather.
        return column if column[:1].is_contiguous() or column.device.type != "cpu" else column.contiguous()
    if isinstance(column, Ragged):
        offsets = column.offsets
        if len(offsets) and offsets[0] == 0 and offsets[-1] == len(column.values) and (column.lengths >= 0).all():
            return Ragged(column.values, offsets.long())
        raise ValueError(f"column {name!r}: offsets have to rise from 0 to the number of values")
    try:
        if hasattr(column, "to_arrow"):  # a series of polars
            column = column.to_arrow()
        elif isinstance(column, (list, tuple)) or type(column).__module__.partition(".")[0] == "pandas":
            column = pa.array(column, from_pandas=False)
    except (pa.ArrowException, TypeError) as error:
        raise TypeError(f"{where}: column {name!r} must be of numbers, or of lists of them: {error}") from error
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        return to_columns(pa.table({str(name): column}), where)[str(name)]
    kind = type(column).__name__ + (f" of {column.dtype}" if isinstance(column, np.ndarray) else "")
    raise TypeError(f"column {name!r} is a {kind}: give tensors, numeric arrays, lists or Ragged")


def dtype_of(column: Column) -> str:
    return f"lists of {column.values.dtype}" if isinstance(column, Ragged) else f"{column.dtype}{column.shape[1:]}"


def to_columns(table: pa.Table, where: str) -> Columns:
    """Return an Arrow table's columns as tensors of the same dtypes; lists become `Ragged`, fixed-size lists
    2-dimensional, and lists of lists of equal lengths 3-dimensional.

    The result may share memory with the table if the type allows it: do not write to it.

    Raises:
        ValueError: A column has nulls, or lists of lists of different lengths, or a type without a tensor; the message
            begins with `where` and names the column.
    """
    return {name: _to_column(table.column(name), f"{where}: column {name!r}") for name in table.column_names}


def _to_column(chunked: pa.ChunkedArray, where: str) -> Any:
    check_type(chunked.type, where)
    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    if array.null_count:
        raise ValueError(f"{where} has {array.null_count} null(s), which a tensor cannot hold: fill or drop them first")
    if pa.types.is_fixed_size_list(array.type) or (is_list(array.type) and _is_nested(array.type.value_type)):
        return _rectangular(array, where)
    if is_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return Ragged(_dense(array.flatten(), where), torch.from_numpy(offsets - offsets[0]))
    return _dense(array, where)


def _rectangular(array: pa.Array, where: str) -> torch.Tensor:
    """Return lists of equal lengths, or lists of such lists, as a tensor; shape (rows, length of each list, ...)."""
    shape = [len(array)]
    while _is_nested(array.type):
        if pa.types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
        else:
            lengths = np.diff(array.offsets.to_numpy())
            shape.append(int(lengths[0]) if len(lengths) else 0)
            if (lengths != shape[-1]).any():
                raise ValueError(
                    f"{where} must have lists of lists of equal lengths, got {shape[-1]} and "
                    f"{lengths[lengths != shape[-1]][0]}: pad them, or flatten them, as with "
                    "pl.col(...).list.eval(pl.element().explode())"
                )
        array = array.flatten()
        if array.null_count:
            raise ValueError(f"{where} has lists with {array.null_count} null(s) in them: fill or drop them first")
    return _dense(array, where).reshape(shape)


def _dense(array: pa.Array, where: str) -> torch.Tensor:
    if array.null_count:
        raise ValueError(f"{where} has lists with {array.null_count} null(s) in them: fill or drop them first")
    if len(array) == 0 or pa.types.is_boolean(array.type):  # Arrow packs booleans into bits
        return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    return torch.from_dlpack(array)  # not by way of NumPy: torch would warn that Arrow's memory is read-only


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_nested(kind: pa.DataType) -> bool:
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def innermost(kind: pa.DataType) -> pa.DataType:
    """Return the type of the elements of lists, or of lists of lists."""
    return innermost(kind.value_type) if _is_nested(kind) else kind


def is_ragged(kind: pa.DataType) -> bool:
    """Return whether columns of a type become `Ragged`."""
    return is_list(kind) and not _is_nested(kind.value_type)


def check_type(kind: pa.DataType, where: str) -> None:
    inner = innermost(kind)
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        raise ValueError(
            f"{where} is {kind}, which has no tensor: turn it into numbers first (categorify, cast), or choose the "
            "columns to read with columns="
        )

"""The form of requests for a fitted workflow: the columns, their types, and the steps that the server runs.

The form is described in `served/preprocess.py`, which decodes it in the server: int64 or bytes, with values that stand
for null and for the padding of lists.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..etl.kernels import Kernel
from ..etl.ops.step import type_name
from ..etl.workflow import Workflow
from .served.preprocess import (
    NULL,
    NULL_STRING,
    NULL_UNSIGNED,
    PADDING,
    PADDING_STRING,
    PADDING_UNSIGNED,
    Array,
    markers,
    with_nulls,
)

_DATETIME = re.compile(r"Datetime\(time_unit='(ms|us|ns)', time_zone=(None|'[^']*')\)")


@dataclass
class Feature:
    """A column that the model uses."""

    dtype: str
    """The name of the NumPy type."""
    is_list: bool = False
    size: int | None = None
    """The number of codes of a categorified column, including null and unknown values."""


@dataclass
class ServedSteps:
    """The steps that a server runs on a request before the model."""

    inputs: dict[str, str]
    """The columns of a request, each with the workflow's name of its type."""
    outputs: dict[str, Feature] = field(default_factory=dict)
    """The columns that the model uses."""
    kernels: list[Kernel] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the files that `served.preprocess.Preprocessing` reads."""
        steps: list[dict[str, Any]] = []
        parts: dict[str, Array] = {}
        for number, kernel in enumerate(self.kernels):
            names: dict[str, list[str]] = {}
            for role, columns in kernel.arrays.items():
                names[role] = [f"{number}.{role}.{place}" for place in range(len(columns))]
                for name, column in zip(names[role], columns, strict=True):
                    parts |= _storable(name, _array(column))
            one = {"kind": kernel.kind, "takes": list(kernel.takes), "makes": list(kernel.makes)}
            steps.append({**one, "options": dict(kernel.options), "arrays": names})
        outputs = {name: feature.dtype for name, feature in self.outputs.items()}
        description = {"inputs": self.inputs, "outputs": outputs, "steps": steps}
        (folder / "steps.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        np.savez(folder / "arrays.npz", **parts)  # type: ignore[arg-type]


def served_steps(workflow: Workflow, columns: Sequence[str] | None) -> ServedSteps:
    """Return the steps that make some of a workflow's outputs. None: all categorified ones.

    Raises:
        RuntimeError: The workflow is not fitted.
        ValueError: A column is not an output of the workflow, no model can use it, or its step cannot run in a server.
    """
    if columns is None and workflow.fitted:
        columns = [name for name in workflow.outputs if name in workflow.vocabularies]
    result = ServedSteps(workflow.needs(columns or []))
    result.outputs = {name: _feature(workflow, name) for name in columns or []}
    wanted = set(result.outputs)
    for step in reversed(workflow.steps):
        made = [name for name in step.adds if name in wanted]
        if made:
            result.kernels[:0] = step.serve(made, workflow.state)
        if not step.selects:  # every row of a request is answered
            wanted = step.needs(wanted)
    for name, kind in result.inputs.items():
        arrow_type(name, kind)
    return result


def _feature(workflow: Workflow, name: str) -> Feature:
    kind, codes = workflow.outputs[name], None
    for step in workflow.steps:
        if name in step.adds:
            codes = step.num_codes(name, codes, workflow.state)
    if codes is not None and kind in ("int64", "list[int64]"):
        return Feature("int64", kind != "int64", codes)
    if numbers := re.fullmatch(r"list\[(int(8|16|32|64))\]", kind):
        return Feature(numbers[1], is_list=True)
    if kind not in ("bool", "float32", "float64") and not re.fullmatch("u?int(8|16|32|64)", kind):
        raise ValueError(f"column {name!r} is {kind}, which no model can take: categorify it, or leave it out")
    return Feature(kind)


def _array(column: pl.Series) -> Array:
    """Convert a column of a server's step to the form of requests."""
    kind = arrow_type(column.name, type_name(column.dtype))
    return to_request(column.to_frame().to_arrow()[0], column.name, kind)


def arrow_type(name: str, kind: str) -> pa.DataType:
    """Return the form in which requests carry a column of a workflow's type: int64, uint64, large_binary or a float, or
    lists.

    Raises:
        ValueError: A request cannot carry the type.
    """
    inner = kind.removeprefix("list[").removesuffix("]")
    is_list = inner != kind
    if inner == "string" or inner.startswith(("Categorical", "Enum")):
        found = pa.large_binary()
    elif inner == "uint64":
        found = pa.uint64()
    elif inner == "bool" or inner.startswith(("int", "uint")) or (_is_date(inner) and not is_list):
        found = pa.int64()
    elif inner in ("float32", "float64") and not is_list:
        return pa.float32() if inner == "float32" else pa.float64()
    else:
        raise ValueError(f"column {name!r} is {kind}, which a request cannot carry: cast it before the workflow")
    return pa.large_list(found) if is_list else found


def _is_date(kind: str) -> bool:
    return kind == "Date" or _DATETIME.fullmatch(kind) is not None


def as_fitted(values: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Return a column with the workflow's type if it has dates, for example with the same unit of time; otherwise
    unchanged.

    Raises:
        ValueError: The column cannot be converted.
    """
    unit = _DATETIME.fullmatch(kind)
    if kind != "Date" and unit is None:
        return values
    target = pa.date32() if unit is None else pa.timestamp(unit[1], None if unit[2] == "None" else unit[2].strip("'"))
    try:
        return values.cast(target, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"a column of type {values.type} cannot be converted to {kind}: {error}") from None


def to_request(values: pa.ChunkedArray, name: str, kind: pa.DataType) -> Array:
    """Convert a column to the form of requests: shape (rows, 1), or (rows, longest) for lists.

    Raises:
        ValueError: A value has a different type, or stands for null or padding.
    """
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    try:
        if pa.types.is_date32(values.type):
            values = values.cast(pa.int32())
        array = values.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"column {name!r} is {values.type}, and cannot be converted to {kind}: {error}") from None
    array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    if not pa.types.is_large_list(kind):
        return _scalars(array, name)[:, None]
    flat = _scalars(array.flatten(), name)  # without what lies under nulls
    null, padding = markers(flat)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    lengths = array.value_lengths().fill_null(0).to_numpy()
    there = np.arange(max(lengths.max(initial=0), 1)) < lengths[:, None]
    result = np.full(there.shape, padding, dtype=flat.dtype)
    result[there] = flat
    result[missing, 0] = null  # a null list is a list of a null
    return result


def _scalars(array: pa.Array, name: str) -> Array:
    if pa.types.is_floating(array.type):
        found = np.array(array.fill_null(math.nan))
        return with_nulls(found, array.is_null().to_numpy(zero_copy_only=False))
    null, padding = (NULL, PADDING) if pa.types.is_integer(array.type) else (NULL_STRING, PADDING_STRING)
    if pa.types.is_uint64(array.type):
        null, padding = NULL_UNSIGNED, PADDING_UNSIGNED
    if pc.any(pc.is_in(array, pa.array([null, padding], array.type))).as_py():
        raise ValueError(f"column {name!r} has the value {null!r} or {padding!r}, which stand for null and padding")
    return np.asarray(array.fill_null(null))


def _storable(key: str, array: Array) -> dict[str, Array]:
    """Return an array that an npz file can store without pickle; `served.preprocess.load_array` reverses this."""
    if array.dtype != object:
        return {key: array}
    distinct, numbers = np.unique(array, return_inverse=True)
    ends = np.cumsum([len(text) for text in distinct.tolist()], dtype=np.int64)
    text = np.frombuffer(b"".join(distinct.tolist()), dtype=np.uint8)
    return {f"{key}.bytes": text, f"{key}.ends": ends, f"{key}.numbers": numbers.reshape(array.shape)}

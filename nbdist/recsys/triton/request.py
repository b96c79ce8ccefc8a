"""A fitted workflow as a request meets it: the columns it carries, in which form, and the steps that follow.

The form is described in `served/preprocess.py`, which undoes it in the server: int64 or bytes, with values that stand
for null and for the padding of lists.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..etl.crossing import HashedCross
from ..etl.elementwise import Bucketize, ColumnStep
from ..etl.groupby import JoinGroupby
from ..etl.moments import key
from ..etl.normalizing import Normalize, NormalizeMinMax
from ..etl.rows import DifferenceLag, Filter
from ..etl.steps import Categorify, Join, type_name
from ..etl.target_encoding import TargetEncoding
from ..etl.vocabulary import Vocabulary
from ..etl.workflow import Workflow
from .served.preprocess import NULL, NULL_STRING, PADDING, PADDING_STRING, Array, markers


@dataclass
class Feature:
    """A column that the model takes."""

    dtype: str
    """NumPy's name."""
    is_list: bool = False
    size: int | None = None
    """How many codes a categorified column has, those of null and unknown values included."""


@dataclass
class ServedSteps:
    """What a server has to do with a request so that the model can take it."""

    inputs: dict[str, str]
    """The columns of a request, each with its type's name in the workflow."""
    outputs: dict[str, Feature] = field(default_factory=dict)
    """What the model takes."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)

    def add_join(self, prefix: str, step: Join, columns: Sequence[str]) -> None:
        """Put a join before the steps; `columns` are those of its table that are wanted."""
        table, missing = step.table.to_arrow(), {}
        for name in columns:
            nulls = pa.nulls(1, table[name].type)  # the row of a key that the table does not have
            column = pa.chunked_array([*table[name].chunks, nulls])
            if pa.types.is_floating(column.type):  # which have no value to stand for null
                missing[name] = f"{prefix}{name}.null"
                self.arrays[missing[name]] = column.is_null().to_numpy()
                column = column.fill_null(math.nan)
            self.arrays[prefix + name] = to_request(column, name, arrow_type(name, type_name(step.table.schema[name])))
        for name in step.on:
            kind = arrow_type(name, type_name(step.table.schema[name]))
            self.arrays[prefix + name] = to_request(table[name], name, kind)[:, 0]
        keys, added = [prefix + name for name in step.on], {name: prefix + name for name in columns}
        self.steps.append({"kind": "join", "on": step.on, "keys": keys, "columns": added, "missing": missing})

    def add_learnt(self, prefix: str, table: pl.DataFrame, on: Sequence[str], defaults: Mapping[str, float]) -> None:
        """Put a table that was learnt before the steps: its keys, null being one, and columns with their defaults."""
        for name in on:
            kind = arrow_type(name, type_name(table.schema[key(name)]))
            self.arrays[prefix + key(name)] = to_request(table.to_arrow()[key(name)], name, kind)[:, 0]
        for name, default in defaults.items():
            values = table[name].to_numpy()
            self.arrays[prefix + name] = np.append(values, values.dtype.type(default))[:, None]
        keys, added = [prefix + key(name) for name in on], {name: prefix + name for name in defaults}
        self.steps.append({"kind": "join", "on": list(on), "keys": keys, "columns": added, "missing": {}})

    def add_vocabulary(self, name: str, vocabulary: Vocabulary) -> None:
        """Put the coding of a column before the steps."""
        key = f"vocabulary.{name}"
        kind = arrow_type(name, type_name(vocabulary.values.dtype))
        self.arrays[key] = to_request(vocabulary.values.to_frame().to_arrow()[0], name, kind)[:, 0]
        self.steps.append(
            {"kind": "categorify", "column": name, "vocabulary": key, "num_buckets": vocabulary.num_buckets}
        )

    def write(self, folder: Path) -> None:
        """Write what `served.preprocess.Preprocessing` reads."""
        outputs = {name: feature.dtype for name, feature in self.outputs.items()}
        description = {"inputs": self.inputs, "outputs": outputs, "steps": self.steps}
        (folder / "steps.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        parts = {name: part for key, array in self.arrays.items() for name, part in _storable(key, array).items()}
        np.savez(folder / "arrays.npz", **parts)  # type: ignore[arg-type]


def served_steps(workflow: Workflow, columns: Sequence[str] | None) -> ServedSteps:
    """What makes some of a workflow's outputs; None: those that are categorified.

    Raises:
        RuntimeError: The workflow is not fitted.
        ValueError: for a column that the workflow does not put out, that no model can take, or that is computed by an
            expression of polars.
    """
    if columns is None and workflow.fitted:
        columns = [name for name in workflow.outputs if name in workflow.vocabularies]
    result = ServedSteps(workflow.needs(columns or []))
    result.outputs = {name: _feature(workflow, name) for name in columns or []}
    wanted = set(result.outputs)
    for number, step in reversed(list(enumerate(workflow.steps))):
        made = [name for name in step.adds if name in wanted]
        if isinstance(step, Join) and made:
            result.add_join(f"join{number}.", step, made)
        elif isinstance(step, Categorify):
            for name in made:
                result.add_vocabulary(name, workflow.vocabularies[name])
        elif isinstance(step, ColumnStep) and made:
            coded = [name for one in workflow.steps[:number] if isinstance(one, Categorify) for name in one.adds]
            for name in made:
                result.steps.append({"kind": step.kind, "column": name, "coded": name in coded, **step.options})
        elif isinstance(step, (Normalize, NormalizeMinMax)):
            for name in made:
                shift, scale = step.shift_and_scale(workflow.learnt, name)
                described = {"kind": "normalize", "column": name, "coded": False, "shift": shift, "scale": scale}
                result.steps.append(described)
        elif isinstance(step, TargetEncoding):
            for name in made:
                defaults = {name: step.default(workflow.learnt, name)}
                table = step.encoded(workflow.learnt, name)
                result.add_learnt(f"learnt{number}.{name}.", table, step.groups[name], defaults)
        elif isinstance(step, JoinGroupby) and made:
            for each, (group, names) in enumerate(step.groups(made)):
                table, values = step.joined(workflow.learnt, group, names)
                result.add_learnt(f"learnt{number}.{each}.", table, group, dict(zip(names, values, strict=True)))
        elif isinstance(step, DifferenceLag) and made:
            raise ValueError(
                f"column {made[0]!r} is the difference from another row, and a request has no other rows: compute it "
                "before the workflow, so that requests carry it, or leave it out of columns="
            )
        elif isinstance(step, HashedCross) and made:
            described = {"kind": "hashed_cross", "columns": step.columns, "num_buckets": step.num_buckets}
            result.steps.append({**described, "column": step.name})
        elif made:
            raise ValueError(
                f"column {made[0]!r} is computed by a polars expression, which a server without polars cannot do: "
                "compute it before the workflow, so that requests carry it, or leave it out of columns=; or use a step "
                "that is served: FillMissing, Log, Clip, Bucketize, ListSlice, HashedCross, Normalize, TargetEncoding, "
                "JoinGroupby"
            )
        if not isinstance(step, Filter):  # every row of a request is answered
            wanted = step.needs(wanted)
    result.steps.reverse()
    for name, kind in result.inputs.items():
        arrow_type(name, kind)
    return result


def _feature(workflow: Workflow, name: str) -> Feature:
    vocabulary, kind = workflow.vocabularies.get(name), workflow.outputs[name]
    makers = [step for step in workflow.steps if name in step.adds]
    if makers and isinstance(makers[-1], Bucketize):
        return Feature("int64", size=makers[-1].size)
    if makers and isinstance(makers[-1], HashedCross):
        return Feature("int64", size=makers[-1].num_buckets + 1)
    if vocabulary is not None:
        return Feature("int64", vocabulary.lists, vocabulary.size)
    if kind not in ("bool", "float32", "float64") and not re.fullmatch("u?int(8|16|32|64)", kind):
        raise ValueError(f"column {name!r} is {kind}, which no model can take: categorify it, or leave it out")
    return Feature(kind)


def arrow_type(name: str, kind: str) -> pa.DataType:
    """How requests carry a column of a workflow's type: int64, large_binary or a float, or lists of the two first.

    Raises:
        ValueError: for types that a request cannot carry.
    """
    inner = kind.removeprefix("list[").removesuffix("]")
    is_list = inner != kind
    if inner == "string" or inner.startswith(("Categorical", "Enum")):
        found = pa.large_binary()
    elif inner == "bool" or inner.startswith(("int", "uint")):
        found = pa.int64()
    elif inner in ("float32", "float64") and not is_list:
        return pa.float32() if inner == "float32" else pa.float64()
    else:
        raise ValueError(f"column {name!r} is {kind}, which a request cannot carry: cast it before the workflow")
    return pa.large_list(found) if is_list else found


def to_request(values: pa.ChunkedArray, name: str, kind: pa.DataType) -> Array:
    """A column as requests carry it: of shape (rows, 1), or (rows, longest) for lists.

    Raises:
        ValueError: where values are not of that kind, or stand for null or padding.
    """
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    try:
        array = values.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"column {name!r} is {values.type}, which is to be {kind}: {error}") from None
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
        if array.null_count:
            raise ValueError(f"column {name!r} has nulls: floats in a request can be NaN, but not null")
        return np.asarray(array)
    null, padding = (NULL, PADDING) if pa.types.is_integer(array.type) else (NULL_STRING, PADDING_STRING)
    if pc.any(pc.is_in(array, pa.array([null, padding], array.type))).as_py():
        raise ValueError(f"column {name!r} has the value {null!r} or {padding!r}, which stand for null and padding")
    return np.asarray(array.fill_null(null))


def _storable(key: str, array: Array) -> dict[str, Array]:
    """An array as an npz file can hold it without pickle; `served.preprocess.load_array` is the way back."""
    if array.dtype != object:
        return {key: array}
    distinct, numbers = np.unique(array, return_inverse=True)
    ends = np.cumsum([len(text) for text in distinct.tolist()], dtype=np.int64)
    text = np.frombuffer(b"".join(distinct.tolist()), dtype=np.uint8)
    return {f"{key}.bytes": text, f"{key}.ends": ends, f"{key}.numbers": numbers.reshape(array.shape)}

"""A model for Triton's Python backend that converts the raw columns of a request to the trained model's inputs.

It runs the steps of a fitted workflow in NumPy. `nbdist.recsys.triton` writes this file into a model repository, with
``steps.json`` and ``arrays.npz`` next to it; it needs only NumPy.

A column is an array with one row per row of the request: shape (rows, 1), or (rows, longest) for lists, which are
padded. Integers, booleans and dates (days, or units of time since 1970) are int64, uint64 columns are uint64, strings
are bytes in an object array. These values stand for a missing value, and for padding:
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

NULL, PADDING = -(2**63), -(2**63) + 1
"""The values for null, and for the padding after the end of a shorter list, in integer columns."""
NULL_STRING, PADDING_STRING = b"\x1a", b"\x19"
"""The same values for string columns;"""
NULL_UNSIGNED, PADDING_UNSIGNED = 2**64 - 0xE6, 2**64 - 0xE7
"""and for uint64 columns."""
NULL_FLOAT_BITS = {4: 0x7FC01A00, 8: 0x7FF8034000000000}
"""The bits of the one NaN that stands for null in float columns, by the number of bytes of the float. Any other NaN is
a NaN."""

Array: TypeAlias = "np.ndarray[Any, Any]"
KERNELS: dict[str, Callable[..., Any]] = {}
"""The steps that ``steps.json`` can have, by kind: functions of the columns that they use, or classes of such
functions."""


def kernel(made: Any) -> Any:
    """Register a function or class in `KERNELS`."""
    KERNELS[made.__name__] = made
    return made


class ValueIndex:
    """A map from values to their positions.

    Args:
        values: The values, shape (n,), all different.
    """

    def __init__(self, values: Array) -> None:
        self._numbers: dict[bytes, int] | None = None
        if values.dtype == object:
            self._numbers = {value: number for number, value in enumerate(values.tolist())}
        else:
            self._order = np.argsort(values)
            self._sorted = values[self._order]

    def __call__(self, values: Array) -> Array:
        """Return the position of each value, -1 for unknown ones; int64, with the shape of `values`."""
        if self._numbers is not None:
            numbers = (self._numbers.get(value, -1) for value in values.ravel().tolist())
            return np.fromiter(numbers, np.int64, values.size).reshape(values.shape)
        if not len(self._sorted):
            return np.full(values.shape, -1)
        if {values.dtype.kind, self._sorted.dtype.kind} == {"i", "u"}:  # what does not fit is not there
            cast = values.astype(self._sorted.dtype)
            return np.where((values < 0) | (cast < 0), -1, self(cast))
        place = np.searchsorted(self._sorted, values).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[place] == values, self._order[place], -1)


@kernel
class Categorify:
    """Map values to codes: 0 null, 1 to `num_buckets` unknown, then the vocabulary; padding stays."""

    def __init__(self, vocabulary: list[Array], num_buckets: int) -> None:
        self._index, self._num_buckets = ValueIndex(vocabulary[0][:, 0]), num_buckets

    def __call__(self, values: Array) -> Array:
        padding = markers(values)[1]
        numbers = self._index(values)
        codes = numbers + 1 + self._num_buckets
        unknown = numbers < 0
        if self._num_buckets > 1:
            codes[unknown] = 1 + (hashed(values[unknown]) % np.uint64(self._num_buckets)).astype(np.int64)
        codes[is_null(values)] = 0
        codes[values == padding] = PADDING
        return codes


def hashed(values: Array) -> Array:
    """Return the hash of each value, uint64, as in `nbdist.recsys.etl.hashing`."""
    if values.dtype == object:
        return np.fromiter((zlib.crc32(value) for value in values.ravel().tolist()), np.uint64, values.size)
    return _mixed(np.ascontiguousarray(values).view(np.uint64))


def _mixed(values: Array) -> Array:
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@kernel
def hashed_cross(*columns: Array, num_buckets: int) -> Array:
    """Return codes of combinations of columns: 0 if one value is null, otherwise 1 to `num_buckets`."""
    first, *others = (hashed(values).reshape(values.shape) for values in columns)
    for other in others:
        first = _mixed(first * np.uint64(0xBF58476D1CE4E5B9) + other)
    codes = 1 + (first % np.uint64(num_buckets)).astype(np.int64)
    for values in columns:
        codes[is_null(values)] = 0
    return codes


@kernel
class Lookup:
    """The rows of a table by its key columns. Its last row is for unknown keys.

    Args:
        keys: The key columns, each of shape (n, 1). No combination occurs twice.
        columns: The columns to add, each with n + 1 rows.
    """

    def __init__(self, keys: list[Array], columns: list[Array]) -> None:
        self._columns = columns
        # One key after the other, the rows get the number of what they have of the keys so far.
        self._levels: list[tuple[ValueIndex, int, ValueIndex]] = []
        number = np.zeros(len(keys[0]), np.int64)
        for key in (key[:, 0] for key in keys):
            values, digit = np.unique(key, return_inverse=True)
            pairs, together = np.unique(number * len(values) + digit, return_inverse=True)
            self._levels.append((ValueIndex(values), len(values), ValueIndex(pairs)))
            number = together
        self._rows = np.append(np.argsort(number), -1)

    def __call__(self, *keys: Array) -> list[Array]:
        number = np.zeros(len(keys[0]), np.int64)
        for (values, size, pairs), key in zip(self._levels, keys, strict=True):
            digit = values(key[:, 0])
            number = pairs(np.where(digit >= 0, number * size + digit, -1))  # -1, too, stays negative
        rows = self._rows[number]
        return [column[rows] for column in self._columns]


@kernel
def fill_missing(values: Array, value: float) -> Array:
    """Replace missing values by `value`."""
    return np.where(_missing(values), values.dtype.type(value), values)


@kernel
def log(values: Array) -> Array:
    """Return log(1 + x), computed in double precision."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log1p(values.astype(np.float64))
    return with_nulls(found.astype(np.float32) if values.dtype == np.float32 else found, is_null(values))


@kernel
def normalize(values: Array, shift: float, scale: float) -> Array:
    """Return (x - shift) / scale, computed in double precision, as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = ((values.astype(np.float64) - shift) / scale).astype(np.float32)
    return with_nulls(found, is_null(values))


@kernel
def clip(values: Array, min_value: float | None, max_value: float | None) -> Array:
    """Limit values to bounds; missing values stay."""
    kind, found = values.dtype, values
    limits = (np.iinfo if kind.kind in "iu" else np.finfo)(kind)
    if min_value is not None and min_value > limits.min:
        found = np.maximum(found, kind.type(min_value))
    if max_value is not None and max_value < limits.max:
        found = np.minimum(found, kind.type(max_value))
    return np.where(_missing(values), values, found)


@kernel
def bucketize(values: Array, boundaries: list[float]) -> Array:
    """Return codes of ranges: 0 for a missing value, 1 below the first boundary, and so on."""
    return np.where(_missing(values), 0, 1 + np.searchsorted(boundaries, values.astype(np.float64), side="right"))


@kernel
def round(values: Array, decimals: int) -> Array:
    """Round floats, with ties to even. Very large numbers do not change."""
    if values.dtype.kind != "f":
        return values
    scale, exact = 10.0**decimals, values.astype(np.float64)
    with np.errstate(over="ignore"):
        scaled = exact * scale
        found = np.where(np.isfinite(scaled), np.rint(scaled) / scale, exact).astype(values.dtype)
    return with_nulls(found, is_null(values))


@kernel
def list_slice(values: Array, first: int | None, last: int | None) -> Array:
    """Cut lists to their first or last values."""
    if last is None:
        return values[:, :first]
    padding = markers(values)[1]
    lengths = (values != padding).sum(axis=1)[:, None]  # (rows, 1)
    places = np.maximum(lengths - last, 0) + np.arange(min(last, values.shape[1]))
    found = np.take_along_axis(values, places.clip(max=values.shape[1] - 1), axis=1)
    found[places >= lengths] = padding
    return found


def _missing(values: Array) -> Array:
    """Find missing values: nulls, and in float columns also NaN."""
    found: Array = np.isnan(values) if values.dtype.kind == "f" else is_null(values)
    return found


class Preprocessing:
    """The steps whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        description = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
        self.inputs: dict[str, str] = description["inputs"]
        self.outputs: dict[str, str] = description["outputs"]
        with np.load(folder / "arrays.npz") as arrays:
            self._steps = [self._step(step, arrays) for step in description["steps"]]

    @staticmethod
    def _step(step: dict[str, Any], arrays: Mapping[str, Array]) -> tuple[list[str], list[str], Callable[..., Any]]:
        found = KERNELS[step["kind"]]
        loaded = {role: [load_array(arrays, name) for name in names] for role, names in step["arrays"].items()}
        options = {**step["options"], **loaded}
        run = found(**options) if isinstance(found, type) else functools.partial(found, **options)
        return step["takes"], step["makes"], run

    def __call__(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs, by name, for the inputs.

        Raises:
            ValueError: A string is not UTF-8, padding is outside of lists, or an output is null, on which no model can
                be trained.
        """
        columns = dict(columns)
        for name, values in columns.items():
            _check(name, values, self.inputs[name].startswith("list["))
        for takes, makes, run in self._steps:
            made = run(*(columns[name] for name in takes))
            columns.update(zip(makes, made if isinstance(made, list) else [made], strict=True))
        return {name: self._cast(name, columns[name], dtype) for name, dtype in self.outputs.items()}

    def _cast(self, name: str, values: Array, dtype: str) -> Array:
        if is_null(values).any():
            raise ValueError(f"{name} is null, which it never was in training")
        if values.dtype == np.int64:
            values = np.where(values == PADDING, -1, values)
        cast = np.ascontiguousarray(values, dtype=dtype)
        if values.dtype.kind in "iu" and (cast != values).any():
            raise ValueError(f"{name} is {values[cast != values][0]}, which does not fit into {dtype}")
        return cast


def load_array(arrays: Mapping[str, Array], key: str) -> Array:
    """Read an array of an npz file; strings are stored as the bytes of the distinct strings, their ends, and
    numbers."""
    if key in arrays:
        return arrays[key]
    text, ends = arrays[f"{key}.bytes"].tobytes(), arrays[f"{key}.ends"].tolist()
    distinct = np.empty(len(ends), dtype=object)
    distinct[:] = [text[start:end] for start, end in zip([0, *ends][:-1], ends, strict=True)]
    return distinct[arrays[f"{key}.numbers"]]


def markers(values: Array) -> tuple[Any, Any]:
    """Return the values that stand for null and padding in an array without floats."""
    if values.dtype == np.uint64:
        return np.uint64(NULL_UNSIGNED), np.uint64(PADDING_UNSIGNED)
    return (NULL_STRING, PADDING_STRING) if values.dtype == object else (NULL, PADDING)


def is_null(values: Array) -> Array:
    """Return a mask of the values that are null."""
    if values.dtype.kind == "f":
        found: Array = values.view(f"u{values.itemsize}") == NULL_FLOAT_BITS[values.itemsize]
    else:
        found = values == markers(values)[0]
    return found


def with_nulls(values: Array, missing: Array) -> Array:
    """Write nulls into floats where `missing` is true, because arithmetic may change the bits of NaN."""
    values.view(f"u{values.itemsize}")[missing] = NULL_FLOAT_BITS[values.itemsize]
    return values


def _check(name: str, values: Array, is_list: bool) -> None:
    if not is_list and values.dtype.kind != "f" and (values == markers(values)[1]).any():
        raise ValueError(f"{name} has the value that stands for padding, which only lists may have")
    if values.dtype == object:
        try:
            b"\0".join(values.ravel().tolist()).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} has a string that is not UTF-8: {error}") from None


class TritonPythonModel:
    """The class that Triton instantiates and calls."""

    def initialize(self, args: dict[str, str]) -> None:
        self._preprocessing = Preprocessing(Path(args["model_repository"], args["model_version"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return an answer for each request. A request that cannot be read gets an error; other requests in its batch
        do not."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        import triton_python_backend_utils as backend  # there in the server alone

        columns = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self._preprocessing(columns)
        except ValueError as error:
            return backend.InferenceResponse(error=backend.TritonError(str(error), backend.TritonError.INVALID_ARG))
        return backend.InferenceResponse([backend.Tensor(name, values) for name, values in outputs.items()])

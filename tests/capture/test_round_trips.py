"""Whatever notebooks hold goes there and back, with sharing and cycles kept."""

from __future__ import annotations

import importlib.machinery
import keyword
import sys
import types
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from objects import same, there_and_back

NAMES = st.text("abcdefg_", min_size=1, max_size=5).filter(
    lambda name: not keyword.iskeyword(name) and name[:2] != "__"
)
SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9)


def make_class(attributes: dict[str, Any], base: type, use: int) -> type:
    """A class that travels by value, with a method whose global is looked up while an instance is hashed."""
    space: dict[str, Any] = {"__name__": "__main__", "SALT": use}
    exec("def __hash__(self): return hash((SALT, type(self).__name__))", space)
    exec("def __eq__(self, other): return vars(self) == vars(other) and SALT is not None", space)
    methods = {"__hash__": space["__hash__"], "__eq__": space["__eq__"]}
    return type("Made", (base,), {**attributes, **methods, "__module__": "__main__"})


CLASSES = st.builds(
    make_class, st.dictionaries(NAMES, SIMPLE, max_size=3), st.sampled_from([object, Exception]), st.integers()
)


@st.composite
def instances(draw: st.DrawFn) -> Any:
    made = draw(CLASSES)()
    vars(made).update(draw(st.dictionaries(NAMES, SIMPLE, max_size=3)))
    return draw(st.sampled_from([made, {made: 1}, [made, made], (made, type(made))]))


@st.composite
def closures(draw: st.DrawFn) -> Any:
    content, default = draw(SIMPLE), draw(SIMPLE)

    def inner(x: Any = default) -> Any:
        return content, x

    inner.__module__ = "__main__"
    return inner


class LazyModule(types.ModuleType):
    """A subclass of the module type, like `_LazyModule` of transformers."""


@pytest.mark.parametrize("name", ["torch.backends", "torch.backends.cudnn", "torch.ops", "torch.ops.aten", "lazy"])
def test_modules_of_any_type_go_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = LazyModule("lazy")
    lazy.__spec__ = importlib.machinery.ModuleSpec("lazy", None)  # an import gives it
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    module: Any = {"torch.ops": torch.ops, "torch.ops.aten": torch.ops.aten}.get(name) or sys.modules[name]
    assert type(module) is not types.ModuleType and there_and_back(module) is module


@settings(deadline=None, max_examples=40)
@given(instances())
def test_classes_and_their_instances(value: Any) -> None:
    got = there_and_back(value)
    assert same(value, got)
    if isinstance(got, dict):
        ((key, one),) = got.items()
        assert one == got[key] == 1  # the hash was the class's own when the table was made
    if isinstance(got, list):
        assert got[0] is got[1]


@settings(deadline=None, max_examples=20)
@given(closures())
def test_closures(fn: Any) -> None:
    got = there_and_back(fn)
    assert same(got(), fn()) and got.__name__ == fn.__name__


@settings(deadline=None, max_examples=20)
@given(st.lists(SIMPLE, max_size=4), st.dictionaries(st.text(max_size=3), SIMPLE, max_size=3))
def test_sharing_and_cycles(items: list[Any], table: dict[str, Any]) -> None:
    shared = [*items]
    value = {"table": table, "again": table, "list": shared, "inner": (shared, [shared])}
    shared.append(value)
    got = there_and_back(value)
    assert got["again"] is got["table"] and got["inner"][0] is got["inner"][1][0] is got["list"]
    assert got["list"][-1] is got and same(got["list"][:-1], items)


@settings(deadline=None, max_examples=20)
@given(
    nps.arrays(nps.scalar_dtypes(), nps.array_shapes(min_dims=0, min_side=0, max_dims=3)),
    st.sampled_from("CF"),
    st.data(),
)
def test_arrays_share_with_none(array: np.ndarray, order: Any, data: st.DataObject) -> None:
    array = np.array(array, order=order)
    got, again = there_and_back((array, array))
    assert got is again and same(got, array)
    assert (got.flags.f_contiguous, got.flags.c_contiguous) == (array.flags.f_contiguous, array.flags.c_contiguous)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.integers(-(2**60), 2**60), st.floats(), st.text(max_size=5), st.none() | st.booleans())))
def test_frames(rows: list[tuple[Any, ...]]) -> None:
    frame = pl.DataFrame(rows, schema={"i": pl.Int64, "x": pl.Float64, "s": pl.String, "b": pl.Boolean}, orient="row")
    boxed = frame.with_columns(pl.Series("o", [[row] for row in rows], dtype=pl.Object))
    assert same(there_and_back(boxed), boxed)
    table = pd.DataFrame(rows, columns=["i", "x", "s", "b"])
    pd.testing.assert_frame_equal(there_and_back(table), table)

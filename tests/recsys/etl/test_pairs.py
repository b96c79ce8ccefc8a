"""Every step after every other, and triples: a server answers as polars does, or refuses, for rows of all sorts."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import tritonclient.http as client
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from nbdist.recsys.etl import (
    Bucketize,
    Categorify,
    Clip,
    Compute,
    DifferenceLag,
    Drop,
    FillMissing,
    Filter,
    HashedCross,
    Join,
    JoinGroupby,
    ListSlice,
    Log,
    Normalize,
    NormalizeMinMax,
    Round,
    TargetEncoding,
    Workflow,
)
from nbdist.recsys.etl.ops.step import Step
from nbdist.recsys.triton import serve, serving
from nbdist.recsys.triton.config import Batching, model_config, write_config
from nbdist.recsys.triton.export import Ensemble, copy_source, tensors_of
from nbdist.recsys.triton.request import served_steps
from nbdist.recsys.triton.served.preprocess import Preprocessing

SCHEMA = {
    "i": pl.Int64,
    "s": pl.String,
    "n": pl.Int16,
    "b": pl.Boolean,
    "f": pl.Float64,
    "g": pl.Float32,
    "l": pl.List(pl.Int64),
    "t": pl.List(pl.String),
    "u": pl.UInt64,
    "d": pl.Date,
    "w": pl.Datetime("ms"),
    "y": pl.Int64,
}
HUGE = [-(2**63) + 2, -(2**62), 2**53 + 1, 2**63 - 1]
integers = st.none() | st.integers(-3, 12) | st.sampled_from(HUGE)
strings = st.none() | st.sampled_from(["", "a", "b", "é", "a\0"])
floats = st.none() | st.sampled_from(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 0.25, 1.25, -3.5, 7.0, 1e30, 1e300, 5e-324]
)
rows = st.lists(
    st.tuples(
        integers,
        strings,
        st.none() | st.integers(-3, 12) | st.sampled_from([-(2**15), 2**15 - 1]),
        st.none() | st.booleans(),
        floats,
        floats.filter(lambda x: x is None or not 1e38 < abs(x) < math.inf),
        st.none() | st.lists(integers, max_size=4),
        st.none() | st.lists(strings, max_size=4),
        st.none() | st.integers(0, 3) | st.sampled_from([2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]),
        st.none() | st.dates(datetime.date(1960, 1, 1), datetime.date(1960, 1, 5)),
        st.none() | st.sampled_from([datetime.datetime(2024, 1, 1), datetime.datetime(1969, 1, 1, 0, 0, 0, 5000)]),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=6,
)
TABLES = {
    "i": pl.DataFrame(
        {
            "i": [-3, 0, 1, 2, 3, 5, 2**63 - 1],
            "j": [7, None, 7, 2**53 + 1, None, -1, 0],
            "js": ["a", None, "", "a", "z", "b", "b"],
            "jf": [0.5, None, math.nan, 7.0, math.inf, 0.0, -0.5],
            "jl": [[1, 2, 3], None, [], [None], [2], [3, 3], [4]],
        }
    ),
    "s": pl.DataFrame({"s": ["", "a", "é"], "k": [True, None, False], "kt": [["a", "b"], [None], None]}),
}


KEYS = (pl.String, pl.Boolean, pl.Date, pl.Datetime)


class Columns:
    """The columns of each kind, as they are before a step."""

    def __init__(self, schema: pl.Schema) -> None:
        self.schema = pl.Schema({name: dtype for name, dtype in schema.items() if name != "y"})
        self.numbers = [name for name, dtype in self.schema.items() if dtype.is_numeric()]
        self.lists = [name for name, dtype in self.schema.items() if isinstance(dtype, pl.List)]
        keys = [n for n, dtype in self.schema.items() if dtype.is_integer() or dtype in KEYS]
        self.keys = list(dict.fromkeys([*keys[:2], *keys[-2:]]))
        """The first and the last of these, the steps before having added the last."""
        self.values = [*keys, *(n for n in self.lists if self.schema[n].inner in (pl.Int64, pl.String))]


def join(columns: Columns, on: str) -> Step | None:
    return Join(TABLES[on], on) if columns.schema.get(on) == SCHEMA[on] else None


MAKERS: dict[str, Callable[[Columns], Step | None]] = {
    "fill_missing": lambda c: FillMissing(*c.numbers, value=3),
    "log": lambda c: Log(*c.numbers),
    "clip": lambda c: Clip(*c.numbers, min_value=1, max_value=100),
    "round": lambda c: Round(*c.numbers, decimals=1),
    "bucketize": lambda c: Bucketize(*c.numbers, boundaries=[-1, 0.5, 7]),
    "list_slice": lambda c: ListSlice(*c.lists, last=2),
    "categorify": lambda c: Categorify(*c.values, min_count={c.values[0]: 2}, num_buckets={c.values[-1]: 3}),
    "hashed_cross": lambda c: HashedCross(*c.keys, name="cross", num_buckets=7),
    "normalize": lambda c: Normalize(*c.numbers),
    "normalize_min_max": lambda c: NormalizeMinMax(*c.numbers),
    "join_groupby": lambda c: JoinGroupby(
        c.keys[-1], c.keys[:2], columns=c.numbers[-2:], stats=["count", "sum", "mean", "std", "var", "min", "max"]
    ),
    "target_encoding": lambda c: TargetEncoding(c.keys[-1], c.keys[:2], target="y", smoothing=1),
    "join": lambda c: join(c, "i"),
    "join of strings": lambda c: join(c, "s"),
    "compute": lambda c: Compute(made=pl.col(c.numbers[-1]) * 2),
    "drop": lambda c: Drop(c.numbers[-1]),
    "filter": lambda c: Filter(pl.col("y") >= 0),
    "difference_lag": lambda c: DifferenceLag(c.numbers[-1], by=c.keys[0]),
}
REFUSED = ("has no value to learn from", "is learned by two", "is in the rows already", "at least", "above -1")


def fitted(names: tuple[str, ...], train: pl.DataFrame) -> Workflow | None:
    """The steps fitted, one after the other; None where one cannot be done after those before it."""
    steps: list[Step] = []
    schema = train.schema
    if "log" in names:  # it learns from numbers that have a logarithm alone; others may be asked
        train = train.with_columns(pl.col(Columns(schema).numbers).abs())
    try:
        for name in names:
            step = MAKERS[name](Columns(schema))
            if step is None:
                return None
            steps.append(step)
            schema = step.check(schema, "here")
        return Workflow(*steps).fit(train, progress=False)
    except ValueError as error:
        assert any(text in str(error) for text in REFUSED), error
        return None


def compare(workflow: Workflow, asked: pl.DataFrame, folder: Path) -> None:
    """A server's answer is polars'; it refuses what is null, and nothing else.

    Columns with a null are refused one by one. Those that no step has changed are refused together here, and one by one
    in `test_columns_that_no_step_changes`: which steps there are makes no difference to them.
    """
    transformed = workflow.transform(asked).collect()
    served = served_columns(workflow)
    nulls = [name for name in served if has_nulls(transformed[name])]
    unchanged = [name for name in nulls if name in asked and transformed[name].equals(asked[name])]
    whole = [name for name in served if name not in nulls]
    for names in [whole, unchanged, *([name] for name in nulls if name not in unchanged)]:
        if names:
            ask(workflow, names, asked, transformed, folder)


def ask(workflow: Workflow, names: list[str], asked: pl.DataFrame, transformed: pl.DataFrame, folder: Path) -> None:
    """Ask for columns together: the answer is polars', or, with a null in one of them, a refusal."""
    if any(has_nulls(transformed[name]) for name in names):
        with pytest.raises(ValueError, match="is null"):
            answer(workflow, names, asked, folder)
    else:
        check_same(answer(workflow, names, asked, folder), transformed)


def served_columns(workflow: Workflow) -> list[str]:
    """The outputs that a server can make."""
    served = []
    for name in workflow.outputs:
        try:
            served_steps(workflow, [name])
            served.append(name)
        except ValueError as error:
            assert any(text in str(error) for text in ("no model can take", "polars expression", "no other rows")), (
                error
            )
    return served


def has_nulls(column: pl.Series) -> bool:
    """Return whether there are nulls, in lists, too."""
    return any(value is None or (isinstance(value, list) and None in value) for value in column.to_list())


def check_same(found: dict[str, Any], transformed: pl.DataFrame) -> None:
    for name, values in found.items():
        column = transformed[name]
        if isinstance(column.dtype, pl.List):
            for row, expected in zip(values.tolist(), column.to_list(), strict=True):
                assert row == expected + [-1] * (len(row) - len(expected)), name
            continue
        assert not column.null_count() and values.dtype == column.to_numpy().dtype, name
        if values.dtype.kind == "f":
            np.testing.assert_allclose(values[:, 0], column.to_numpy(), rtol=1e-6, atol=1e-9, err_msg=name)
        else:
            assert values[:, 0].tolist() == column.to_numpy().tolist(), name


def answer(workflow: Workflow, columns: list[str], asked: pl.DataFrame, folder: Path) -> dict[str, Any]:
    result = served_steps(workflow, columns)
    result.write(folder)
    return Preprocessing(folder)(Ensemble(folder, "", result.inputs, "").request(asked))


def check(names: tuple[str, ...], seen: list[Any], asked: list[Any], folder: Path) -> None:
    train, rows = (pl.DataFrame(each, schema=SCHEMA, orient="row") for each in (seen, asked))
    workflow = fitted(names, train)
    if workflow is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(workflow, rows, folder)


@given(seen=rows, asked=rows)
@settings(max_examples=8, derandomize=True, phases=[Phase.generate])
def test_columns_that_no_step_changes(
    tmp_path_factory: pytest.TempPathFactory, seen: list[Any], asked: list[Any]
) -> None:
    train, frame = (pl.DataFrame(each, schema=SCHEMA, orient="row") for each in (seen, asked))
    workflow = Workflow(Drop("y")).fit(train, progress=False)
    served = served_columns(workflow)
    assert set(served) == {"i", "n", "b", "f", "g", "l", "u"}
    for name in served:
        ask(workflow, [name], frame, workflow.transform(frame).collect(), tmp_path_factory.getbasetemp())


@given(first=st.sampled_from(list(MAKERS)), second=st.sampled_from(list(MAKERS)), seen=rows, asked=rows)
@settings(max_examples=16, derandomize=True)
def test_pairs_of_steps_match_the_reference(
    tmp_path_factory: pytest.TempPathFactory, first: str, second: str, seen: list[Any], asked: list[Any]
) -> None:
    check((first, second), seen, asked, tmp_path_factory.getbasetemp())


@pytest.mark.long("every step after every other")
@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
def test_each_step_after_each_other(tmp_path: Path, first: str, second: str) -> None:
    @given(seen=rows, asked=rows)
    @settings(max_examples=2, derandomize=True, phases=[Phase.generate])  # made small, one takes minutes
    def compared(seen: list[Any], asked: list[Any]) -> None:
        check((first, second), seen, asked, tmp_path)

    compared()


@pytest.mark.long("triples of steps")
@given(names=st.tuples(*[st.sampled_from(list(MAKERS))] * 3), seen=rows, asked=rows)
@settings(max_examples=150, derandomize=True, phases=[Phase.generate])
def test_triples_of_steps(
    tmp_path_factory: pytest.TempPathFactory, names: tuple[str, str, str], seen: list[Any], asked: list[Any]
) -> None:
    check(names, seen, asked, tmp_path_factory.getbasetemp())


def write_model(repository: Path, name: str, workflow: Workflow, columns: list[str]) -> Ensemble:
    """A model of the Python backend that does the steps, as `export_ensemble` writes it."""
    steps = served_steps(workflow, columns)
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    steps.write(folder)
    copy_source("preprocess.py", folder)
    write_config(model_config(name, "python", Batching(64, 0.0), *tensors_of(steps)), folder.parent)
    return Ensemble(repository, name, steps.inputs, "")


@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
@pytest.mark.long("Triton: a server with 60 models")
def test_pairs_and_triples_on_a_real_server(tmp_path: Path) -> None:
    """Models of what can be served, each with rows of all sorts; and of columns with a null, which are refused."""
    asks: list[tuple[Ensemble, pl.DataFrame, pl.DataFrame, list[str], bool]] = []

    @given(names=st.lists(st.sampled_from(list(MAKERS)), min_size=2, max_size=3), seen=rows, asked=rows)
    @settings(max_examples=150, derandomize=True, phases=[Phase.generate], deadline=None)
    def collect(names: list[str], seen: list[Any], asked: list[Any]) -> None:
        train, frame = (pl.DataFrame(each, schema=SCHEMA, orient="row") for each in (seen, asked))
        workflow = fitted(tuple(names), train) if len(asks) < 60 else None
        if workflow is None:
            return
        transformed = workflow.transform(frame).collect()
        whole, refused = [], []
        for name in served_columns(workflow):
            (refused if has_nulls(transformed[name]) else whole).append(name)
        for columns, good in ((whole, True), (refused[:1], False)):
            if columns:
                model = write_model(tmp_path / "repository", f"m{len(asks)}", workflow, columns)
                asks.append((model, frame, transformed, columns, good))

    collect()
    assert len(asks) >= 60
    with serve(tmp_path / "repository", timeout=900) as server, client.InferenceServerClient(server.http) as one:
        for model, frame, transformed, columns, good in asks:
            given_columns = []
            for name, array in model.request(frame).items():
                given_columns.append(client.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
                given_columns[-1].set_data_from_numpy(array)
            if good:
                answers = one.infer(model.name, given_columns)
                check_same({name: answers.as_numpy(name) for name in columns}, transformed)
            else:
                with pytest.raises(InferenceServerException, match="is null"):
                    one.infer(model.name, given_columns)

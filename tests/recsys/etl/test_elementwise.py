"""Steps that change single values: what polars makes of them in training is what NumPy makes of them in a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.etl import (
    Bucketize,
    Categorify,
    Clip,
    FillMissing,
    HashedCross,
    Join,
    ListSlice,
    Log,
    Normalize,
    Workflow,
)
from nbdist.recsys.triton.export import Ensemble
from nbdist.recsys.triton.request import served_steps
from nbdist.recsys.triton.served.preprocess import Preprocessing


def test_a_number_without_a_logarithm_is_refused() -> None:
    rows = pl.DataFrame({"visits": [0, 7, None], "price": [1.0, float("nan"), -0.5]})
    Workflow(Log("visits", "price")).fit(rows, progress=False)
    for column, worst in (("visits", -1), ("price", -3.0)):
        wrong = pl.concat([rows, rows.with_columns(pl.lit(worst).alias(column)).cast(rows.schema)])
        with pytest.raises(
            ValueError, match=f"Log: column '{column}' must have numbers above -1, got {worst} in row 3"
        ):
            Workflow(Log("visits", "price")).fit(wrong, progress=False)
        Workflow(Clip(column, min_value=0), Log("visits", "price")).fit(wrong, progress=False)


SCHEMA = {
    "age": pl.Int32,
    "visits": pl.UInt8,
    "price": pl.Float32,
    "rate": pl.Float64,
    "history": pl.List(pl.Int64),
    "tags": pl.List(pl.String),
}
STEPS = (
    Bucketize("age", boundaries=[-5, 18.5, 65]),
    FillMissing("visits", value=3),
    Clip("visits", min_value=2, max_value=90),
    FillMissing("price", value=1),
    Clip("price", min_value=0),
    Log("visits", "price"),
    Bucketize("rate", boundaries=[0, 0.1]),
    ListSlice("history", last=2),
    Categorify("history", "tags"),
    ListSlice("tags", first=3),
    ListSlice("tags", last=2),
)

rows = st.lists(
    st.tuples(
        st.none() | st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-6, -5, 18, 19, 65, 66]),
        st.none() | st.integers(0, 255),
        st.floats(width=32, allow_infinity=False),
        st.floats() | st.sampled_from([0.0, -0.0, 0.1]),
        st.none() | st.lists(st.none() | st.integers(0, 5), max_size=5),
        st.none() | st.lists(st.none() | st.sampled_from(["x", "y", "z"]), max_size=5),
    ),
    min_size=1,
    max_size=15,
)


@pytest.fixture(scope="module")
def workflow() -> Workflow:
    seen = pl.DataFrame([(1, 1, 1.0, 1.0, [1, 2, 3], ["x", "y"])], schema=SCHEMA, orient="row")
    return Workflow(*STEPS).fit(seen, progress=False)


@pytest.fixture(scope="module")
def served(workflow: Workflow, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ensemble, Preprocessing]:
    path = tmp_path_factory.mktemp("elementwise")
    result = served_steps(workflow, list(SCHEMA))
    result.write(path)
    assert [result.outputs[name].size for name in ("age", "rate", "price")] == [5, 4, None]
    return Ensemble(path, "", result.inputs, ""), Preprocessing(path)


@given(rows)
@settings(max_examples=30, deadline=None)
def test_the_server_does_what_training_did(
    workflow: Workflow, served: tuple[Ensemble, Preprocessing], rows: list[Any]
) -> None:
    ensemble, preprocessing = served
    frame = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    found = preprocessing(ensemble.request(frame))
    for name, column in workflow.transform(frame).collect().to_dict().items():
        if name in ("history", "tags"):
            assert [[code for code in row if code != -1] for row in found[name].tolist()] == column.to_list(), name
        else:
            assert found[name].dtype == column.to_numpy().dtype
            np.testing.assert_allclose(found[name][:, 0], column.to_numpy(), rtol=1e-6, err_msg=name)


def test_elementwise_steps_give_expected_values() -> None:
    frame = pl.DataFrame(
        {
            "age": [None, -5, 18, 66],
            "visits": [None, 1, 91, 0],
            "price": [None, math.nan, -3.0, math.e - 1],
            "rate": [None, -1.0, 0.0, 0.2],
            "history": [None, [], [1, 2, 3], [3]],
            "tags": [None, ["x", "y", "x", "y"], ["y"], []],
        },
        schema=SCHEMA,
    )
    found = Workflow(*STEPS).fit(frame, progress=False).transform(frame).collect().to_dict(as_series=False)
    assert found["age"] == [0, 2, 2, 4] and found["rate"] == [0, 1, 2, 3]
    assert found["visits"] == pytest.approx([math.log(x + 1) for x in (3, 2, 90, 2)])
    assert found["price"] == pytest.approx([math.log(2), math.log(2), 0, 1], rel=1e-6)
    x, y = (Workflow(*STEPS).fit(frame, progress=False).vocabularies["tags"].mapping()[tag] for tag in "xy")
    assert found["tags"] == [[0], [y, x], [y], []] and [len(one) for one in found["history"]] == [1, 0, 2, 1]


def test_elementwise_steps_are_saved(workflow: Workflow, tmp_path: Path) -> None:
    workflow.save(tmp_path / "saved")
    loaded = Workflow.load(tmp_path / "saved")
    assert repr(loaded) == repr(workflow) and loaded.describe() == workflow.describe()
    kinds = [step["kind"] for step in json.loads((tmp_path / "saved" / "workflow.json").read_text())["steps"]]
    assert kinds[:3] == ["bucketize", "fill_missing", "clip"]


def test_a_joined_column_is_changed_after_it_is_joined() -> None:
    movies = pl.DataFrame({"movie": [1, 2], "year": [1979, None], "cast": [["a", "b"], ["c"]]})
    steps = (
        Join(movies, "movie"),
        FillMissing("year", value=2000),
        ListSlice("cast", first=1),
        Categorify("year", "cast"),
    )
    rows = pl.DataFrame({"movie": [2, 1, 1, 3]})
    one = Workflow(*steps).fit(rows, progress=False)
    assert {name: v.mapping() for name, v in one.vocabularies.items()} == {
        "year": {1979: 2, 2000: 3},
        "cast": {"a": 2, "c": 3},
    }
    assert one.transform(rows).collect().rows() == [(2, 3, [3]), (1, 2, [2]), (1, 2, [2]), (3, 3, [0])]


def test_a_null_whose_logarithm_no_model_was_trained_on(tmp_path: Path) -> None:
    one = Workflow(Log("x")).fit(pl.DataFrame({"x": [1]}), progress=False)
    result = served_steps(one, ["x"])
    result.write(tmp_path)
    request = Ensemble(tmp_path, "", result.inputs, "").request(pl.DataFrame({"x": [None]}, schema={"x": pl.Int64}))
    with pytest.raises(ValueError, match="x is null, which it never was in training"):
        Preprocessing(tmp_path)(request)


def test_the_next_step_gets_a_logarithm_in_the_type_of_its_column(tmp_path: Path) -> None:
    exact = {np.float32(x): np.log1p(np.float64(np.float32(x))) for x in np.arange(0.1, 1.0, 0.1)}
    x, boundary = next((x, float(np.float32(log))) for x, log in exact.items() if np.float32(log) > log)
    rows = pl.DataFrame({"x": [x]}, schema={"x": pl.Float32})
    one = Workflow(Log("x"), Bucketize("x", boundaries=[boundary])).fit(rows, progress=False)
    assert one.transform(rows).collect()["x"].to_list() == [2]
    result = served_steps(one, ["x"])
    result.write(tmp_path)
    assert Preprocessing(tmp_path)(Ensemble(tmp_path, "", result.inputs, "").request(rows))["x"].tolist() == [[2]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FillMissing("a", value=math.nan), "`value` must be a finite number, got nan"),
        (lambda: FillMissing(value=1), "no columns are named"),
        (lambda: Clip("a"), "give min_value=, max_value=, or both"),
        (lambda: Clip("a", min_value=2, max_value=1), "`min_value` must be at most `max_value`, got 2 and 1"),
        (lambda: Clip("a", min_value=-math.inf, max_value=math.inf), "give min_value=, max_value=, or both"),
        (lambda: Clip("a", min_value=math.nan), "`min_value` must not be NaN or inf, got nan"),
        (lambda: Clip("a", max_value=-math.inf), "`max_value` must not be NaN or -inf, got -inf"),
        (lambda: Bucketize("a", boundaries=[0, math.inf]), "`boundaries` must be rising finite numbers"),
        (lambda: Bucketize("a", boundaries=[math.nan]), "`boundaries` must be rising finite numbers"),
        (lambda: Bucketize("a", boundaries=[]), "`boundaries` must be rising finite numbers"),
        (lambda: Bucketize("a", boundaries=[1, 1]), "`boundaries` must be rising finite numbers"),
        (lambda: ListSlice("a"), "give one of `first` and `last`, at least 1"),
        (lambda: ListSlice("a", first=1, last=1), "give one of `first` and `last`, at least 1"),
        (lambda: ListSlice("a", last=0), "give one of `first` and `last`, at least 1"),
    ],
)
def test_arguments_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Log("name"), "Log: column 'name' is String: numbers are needed"),
        (ListSlice("age", last=1), "ListSlice: column 'age' is Int8: lists are needed"),
        (Clip("nowhere", min_value=1), "no column 'nowhere'"),
        (FillMissing("age", value=1.5), "`value` must be a value of Int8, got 1.5"),
        (Clip("age", max_value=0.5), r"Clip\('age', .*bounds must be values of Int8, got 0.5"),
        (FillMissing("age", value=300), "FillMissing"),
    ],
)
def test_columns_that_do_not_fit(step: Any, message: str) -> None:
    rows = pl.DataFrame({"age": pl.Series([1], dtype=pl.Int8), "name": ["a"]})
    with pytest.raises(ValueError, match=message):
        Workflow(step).fit(rows, progress=False)


# --- columns together ---

CROSS = {"genre": pl.String, "age": pl.Int32, "free": pl.Boolean}


@pytest.mark.long("Triton: exports and a server")
@given(
    st.lists(
        st.tuples(
            st.none() | st.sampled_from(["war", "drama", "é", ""]),
            st.none() | st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3),
            st.none() | st.booleans(),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 50),
)
@settings(max_examples=20, deadline=None)
def test_combinations_have_the_same_codes_in_the_server(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], num_buckets: int
) -> None:
    path = tmp_path_factory.mktemp("cross")
    frame = pl.DataFrame(rows, schema=CROSS, orient="row")
    one = Workflow(HashedCross("genre", "age", "free", name="all", num_buckets=num_buckets)).fit(frame, progress=False)
    codes = one.transform(frame, ["all"]).collect()["all"].to_list()
    assert all((code == 0) == (None in row) and 0 <= code <= num_buckets for code, row in zip(codes, rows, strict=True))
    one.save(path / "saved")
    loaded = Workflow.load(path / "saved")
    assert repr(loaded) == repr(one) and loaded.transform(frame, ["all"]).collect()["all"].to_list() == codes
    result = served_steps(one, ["all"])
    result.write(path)
    assert result.inputs == {"genre": "string", "age": "int32", "free": "bool"}
    assert result.outputs["all"].size == num_buckets + 1
    found = Preprocessing(path)(Ensemble(path, "", result.inputs, "").request(frame))["all"]
    assert found[:, 0].tolist() == codes


def test_many_columns_together() -> None:
    """The query grew eightfold with each column: six of them took minutes."""
    rows = pl.DataFrame({name: [1, 2, None] for name in "abcdefgh"})
    one = Workflow(HashedCross(*rows.columns, name="all", num_buckets=1000)).fit(rows, progress=False)
    first, second, third = one.transform(rows).collect()["all"].to_list()
    assert first != second and third == 0


def test_hashed_crosses_distinguish_combinations() -> None:
    rows = [(a, b) for a in range(60) for b in range(60)]
    frame = pl.DataFrame(rows, schema=["a", "b"], orient="row")
    codes = Workflow(HashedCross("a", "b", name="c", num_buckets=1 << 40)).fit(frame, progress=False).transform(frame)
    assert codes.collect()["c"].n_unique() == len(rows), "and (1, 2) is not (2, 1)"
    spread = (
        Workflow(HashedCross("a", "b", name="c", num_buckets=10))
        .fit(frame, progress=False)
        .transform(frame)
        .collect()["c"]
    )
    assert spread.value_counts()["count"].min() > 280


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HashedCross("a", name="c", num_buckets=3), "two columns or more"),
        (lambda: HashedCross("a", "b", name="c", num_buckets=0), "`num_buckets` must be at least 1, got 0"),
        (
            lambda: Workflow(HashedCross("a", "b", name="c", num_buckets=3)).fit(pl.DataFrame({"a": [1], "b": [[1]]})),
            "column 'b' is List",
        ),
        (
            lambda: Workflow(HashedCross("a", "b", name="c", num_buckets=3)).fit(pl.DataFrame({"a": [1], "b": [0.5]})),
            "column 'b' is Float64",
        ),
    ],
)
def test_crosses_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("step", [Log("x"), Normalize("x")])
def test_numbers_made_of_codes_are_served_as_numbers(tmp_path: Path, step: Any) -> None:
    rows = pl.DataFrame({"x": ["a", "b", "b", None]})
    one = Workflow(Categorify("x"), step).fit(rows, progress=False)
    result = served_steps(one, ["x"])
    result.write(tmp_path)
    expected = one.transform(rows).collect()["x"].to_numpy()
    assert result.outputs["x"].dtype == expected.dtype and result.outputs["x"].size is None
    found = Preprocessing(tmp_path)(Ensemble(tmp_path, "", result.inputs, "").request(rows))["x"]
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)


def test_an_infinite_bound_is_no_bound(tmp_path: Path) -> None:
    rows = pl.DataFrame({"age": [-1, 30]})
    for bounds, expected in (((0, math.inf), [0, 30]), ((-math.inf, 7), [-1, 7]), ((np.int64(0), None), [0, 30])):
        workflow = Workflow(Clip("age", min_value=bounds[0], max_value=bounds[1])).fit(rows, progress=False)
        workflow.save(tmp_path / "saved", overwrite=True)
        for one in (workflow, Workflow.load(tmp_path / "saved")):
            assert one.transform(rows).collect()["age"].to_list() == expected


@pytest.mark.parametrize("dtype", [pl.Int8, pl.UInt8, pl.Int64, pl.UInt64])
def test_a_bound_beyond_all_values_of_a_type_does_nothing(tmp_path: Path, dtype: Any) -> None:
    rows = pl.DataFrame({"n": pl.Series([0, 5, 100, None], dtype=dtype)})
    for low, high, expected in ((-(2**70), 2**70, [0, 5, 100, None]), (3, 2**64, [3, 5, 100, None])):
        workflow = Workflow(Clip("n", min_value=low, max_value=high)).fit(rows, progress=False)
        assert workflow.transform(rows).collect()["n"].to_list() == expected
        result = served_steps(workflow, ["n"])
        result.write(tmp_path)
        asked = rows.drop_nulls()
        found = Preprocessing(tmp_path)(Ensemble(tmp_path, "", result.inputs, "").request(asked))["n"]
        assert found[:, 0].tolist() == expected[:3]
    with pytest.raises(ValueError, match=r"Clip.*conversion from .* failed"):  # all values would be what none can be
        Workflow(Clip("n", min_value=2**70)).fit(rows, progress=False)

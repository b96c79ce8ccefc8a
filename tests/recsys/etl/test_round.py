"""Numbers rounded: halves to the even neighbor, the same in training and in a server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.recsys.etl import Categorify, Round, Workflow
from nbdist.recsys.triton.export import Ensemble
from nbdist.recsys.triton.request import served_steps
from nbdist.recsys.triton.served.preprocess import Preprocessing


def test_round_gives_expected_values(tmp_path: Path) -> None:
    rows = pl.DataFrame({"a": [0.125, -0.375, math.inf, 1e300, None], "b": [0.5, 1.5, 2.5, -0.4, 0.0], "c": range(5)})
    one = Workflow(Round("a", decimals=2), Round("b", "c")).fit(rows, progress=False)
    assert one.transform(rows).collect().to_dict(as_series=False) == {
        "a": [0.12, -0.38, math.inf, 1e300, None],
        "b": [0.0, 2.0, 2.0, -0.0, 0.0],
        "c": [0, 1, 2, 3, 4],
    }
    one.save(tmp_path / "saved")
    loaded = Workflow.load(tmp_path / "saved")
    assert repr(loaded) == repr(one) == "Workflow(Round('a', decimals=2), Round('b', 'c', decimals=0))"
    assert loaded.transform(rows).collect().equals(one.transform(rows).collect())


@given(st.lists(st.tuples(st.floats(), st.floats(width=32), st.integers(-5, 5)), min_size=1), st.integers(0, 15))
def test_a_server_rounds_as_training_did(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], decimals: int
) -> None:
    path = tmp_path_factory.mktemp("round")
    frame = pl.DataFrame(rows, schema={"a": pl.Float64, "b": pl.Float32, "c": pl.Int8}, orient="row")
    one = Workflow(Round("a", "b", "c", decimals=decimals)).fit(frame, progress=False)
    result = served_steps(one, ["a", "b", "c"])
    result.write(path)
    found = Preprocessing(path)(Ensemble(path, "", result.inputs, "").request(frame))
    for name, column in one.transform(frame).collect().to_dict().items():
        assert found[name].dtype == column.to_numpy().dtype
        np.testing.assert_array_equal(found[name][:, 0], column.to_numpy(), err_msg=name)


def test_codes_stay_codes() -> None:
    one = Workflow(Categorify("a"), Round("a", decimals=1)).fit(pl.DataFrame({"a": [7, 8]}), progress=False)
    assert served_steps(one, ["a"]).outputs["a"].size == 4


@pytest.mark.parametrize("decimals", [-1, 16, 0.5, True])
def test_arguments_that_make_no_sense(decimals: Any) -> None:
    with pytest.raises(ValueError, match="decimals must be an integer from 0 to 15, got"):
        Round("a", decimals=decimals)


def test_columns_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="Round: column 'a' is String: numbers are needed"):
        Workflow(Round("a")).fit(pl.DataFrame({"a": ["x"]}), progress=False)

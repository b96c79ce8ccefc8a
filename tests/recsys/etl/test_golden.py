"""Workflows that were saved once load, answer and are served as they were then, and are fitted again to the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from golden import make
from polars.testing import assert_frame_equal

from nbdist.recsys.etl import Workflow


def description(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "workflow.json").read_text("utf8")), "polars": pl.__version__}


def check(workflow: Workflow, name: str) -> None:
    case, folder = make.CASES[name], make.HERE / name
    assert_frame_equal(make.transformed(workflow, case), pl.read_parquet(folder / "transformed.parquet"), rel_tol=1e-6)
    assert_frame_equal(make.written(workflow), pl.read_parquet(folder / "written.parquet"), rel_tol=1e-6)
    expected = json.loads((folder / "served.json").read_text("utf8"))
    found = make.as_json(make.served(workflow, case))
    assert found.keys() == expected.keys()
    for column, one in found.items():
        assert one["dtype"] == expected[column]["dtype"], column
        values = zip(one["values"], expected[column]["values"], strict=True)
        assert all(row == pytest.approx(other, rel=1e-6, nan_ok=True) for row, other in values), column


@pytest.mark.parametrize("name", make.CASES)
def test_a_saved_workflow_is_what_it_was(name: str, tmp_path: Path) -> None:
    saved = make.HERE / name / "saved"
    text = (saved / "workflow.json").read_text("utf8")
    if '"expression"' in text and json.loads(text)["polars"] != pl.__version__:
        pytest.skip("another polars may not read the JSON of an expression")
    workflow = Workflow.load(saved)
    check(workflow, name)
    workflow.save(tmp_path / "again")
    assert description(tmp_path / "again") == description(saved)
    assert {file.name for file in saved.iterdir()} == {file.name for file in (tmp_path / "again").iterdir()}
    for file in saved.glob("*.parquet"):
        assert_frame_equal(pl.read_parquet(tmp_path / "again" / file.name), pl.read_parquet(file))


@pytest.mark.parametrize("name", make.CASES)
def test_the_steps_are_fitted_to_what_they_were(name: str, tmp_path: Path) -> None:
    workflow = make.fitted(make.CASES[name])
    check(workflow, name)
    workflow.save(tmp_path / "saved")
    saved = make.HERE / name / "saved"
    if json.loads((saved / "workflow.json").read_text("utf8"))["polars"] == pl.__version__:
        assert description(tmp_path / "saved") == description(saved)
    for file in saved.glob("*.parquet"):
        assert_frame_equal(pl.read_parquet(tmp_path / "saved" / file.name), pl.read_parquet(file))


def test_every_kind_of_step_is_among_them() -> None:
    kinds = {step["kind"] for name in make.CASES for step in description(make.HERE / name / "saved")["steps"]}
    assert len(kinds) == 16

"""The findings that `make gpu` keeps of a run that was cut off."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks.gpu import notes
from benchmarks.gpu.__main__ import PARTS, run_part
from benchmarks.gpu.rendering import table


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "findings.jsonl"
    monkeypatch.setenv(notes.FILE, str(path))
    monkeypatch.setenv(notes.PART, "launch")
    return path


def test_findings_are_in_the_file_at_once_and_a_cut_line_is_left_out(file: Path) -> None:
    notes.note("a launch", "80 ms, 1.10 × the bare fork", met=True, bar="at most 1.5 ×")
    notes.note("conditions", "- GPUs: one")
    with notes.attempt("a second | launch"):
        raise ValueError("no GPU")
    with file.open("a") as end:
        end.write('{"part": "launch", "what": "half a li')
    page = "\n".join(table(notes.read(file)))
    assert "| a launch | 80 ms, 1.10 × the bare fork | at most 1.5 × | as promised |" in page
    assert "| a second / launch | ValueError: no GPU |  | **not** |" in page
    assert "1 promises shown, 1 not." in page and "half" not in page
    assert page.endswith("- GPUs: one")


def test_a_part_that_lacks_a_package_is_left_out_and_one_over_its_limit_is_cut_off(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = importlib.import_module("benchmarks.gpu.truth")
    monkeypatch.setattr(truth, "NEEDS", ("no_such_package",))
    assert run_part("truth", "cpu", file, 100.0)
    assert run_part("launch", "cpu", file, 1.0)
    found = [(one["what"], one["value"]) for one in notes.read(file)]
    assert found == [("left out", "no_such_package not installed"), ("left out", "the time for all parts is over")]


@pytest.mark.parametrize("name", PARTS)
def test_each_part_says_its_limit_and_what_it_needs(name: str) -> None:
    part = importlib.import_module(f"benchmarks.gpu.{name}")
    assert 0 < part.LIMIT <= 240 and isinstance(part.NEEDS, tuple) and callable(part.run) and part.__doc__

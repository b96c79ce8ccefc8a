"""Habits of people in notebooks, by public reports, have the outcome that their page gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import Cell

sys.path.insert(0, str(Path(__file__).parent / "docs"))

import habits


@pytest.mark.parametrize("case", habits.CELLS)
def test_a_habit_has_the_documented_outcome(cell: Cell, case: str) -> None:
    for library in habits.needs(case):
        pytest.importorskip(library)
    cell(habits.CELLS[case])


def test_the_page_is_made_of_these() -> None:
    assert habits.PAGE.read_text(encoding="utf-8") == habits.page()

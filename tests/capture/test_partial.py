"""A part of a value that cannot come back is all that is missing."""

from __future__ import annotations

import pickle

import pytest
from cells import cells
from conftest import Cell

from nbdist.capture.partial import Absent, absent_parts, loads

CELLS = cells("capture/cells/partial.py")


@pytest.mark.parametrize("case", CELLS)
def test_the_readable_parts_of_a_value_come_back(cell: Cell, case: str) -> None:
    cell(CELLS[case])


def test_parts_that_cannot_be_pickled_are_found() -> None:
    lines = (line for line in ())
    found = absent_parts({"a": [lines, 3], "b": lines}, "it", {})
    assert {number: absent.name for number, absent in found.items()} == {id(lines): "it['a'][0]"}
    assert absent_parts(lines, "it", {}) == {}
    assert absent_parts([(line for line in ()) for _ in range(30)], "it", {}) == {}, "a value of another kind"


def test_readable_pickles_give_the_same_as_with_pickle() -> None:
    value = [1, "text", {"a": (2, 3), "b": {4}}, ValueError("no"), range(3)]
    pickled = memoryview(pickle.dumps(value, protocol=5))
    read = loads(pickled, buffers=[], name=lambda: "it")
    assert repr(read) == repr(value)
    lost = pickled.tobytes().replace(b"builtins", b"bulitins")
    read = loads(memoryview(lost), buffers=[], name=lambda: "it")
    assert read[:3] == value[:3] and isinstance(read[4], Absent) and "ModuleNotFoundError" in read[4].why

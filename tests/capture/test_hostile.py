"""Nothing that is only help fails a call, whatever objects the process has."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
from cells import cells
from conftest import Cell

from nbdist.capture.diagnosis import explain_failure
from nbdist.capture.foreign import attribute, contents, is_a, looked, name_of, text

CELLS = cells("capture/cells/hostile.py")


@pytest.mark.parametrize("case", [name for name in CELLS if name != "the object"])
def test_an_object_that_answers_nothing_fails_no_call(cell: Cell, case: str) -> None:
    cell(CELLS["the object"])
    cell(CELLS[case])


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_attributes_are_read_without_running_the_objects_code() -> None:
    hostile = Hostile()
    assert contents(hostile) == {} and attribute(hostile, "x") is None and name_of(hostile) == "Hostile"
    assert text(hostile, "__module__") == __name__ and text(hostile, "__len__") == ""
    assert is_a(hostile, Hostile) and not is_a(hostile, types.FunctionType)
    assert contents(Hostile)["__getattribute__"] is vars(Hostile)["__getattribute__"]
    assert contents(3) == contents(type("Odd", (), {"__dict__": property(lambda self: 1 / 0)})()) == {}


def test_a_failing_look_gives_one_notice() -> None:
    with pytest.warns(UserWarning, match=r"what is looked at cannot be read.*ZeroDivisionError"):
        assert looked(lambda: 1 // 0, 5, "what is looked at") == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert looked(lambda: 1 // 0, 5, "what is looked at") == 5
        assert looked(lambda: 3, 5, "another") == 3


class Part:
    """Refers to the whole, as fastai's callbacks to their learner."""

    def __init__(self, whole: Any, held: Any = None) -> None:
        self.whole, self.held = whole, held


class Whole:
    def __init__(self) -> None:
        self.parts = [Part(self), Part(self, {"log": (line for line in ())}), Part(self)]


def test_the_error_names_the_part_that_cannot_be_pickled_in_a_cycle() -> None:
    assert str(explain_failure(TypeError("no"), {"learn": Whole()})).startswith("learn.parts[1].held['log'] cannot")

"""Things that the notebook shares with other processes are shared with ranks, or a warning says that they are not."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
from cells import cells
from conftest import Cell

from nbdist.capture.pickler import Pickler

CELLS = cells("capture/cells/shared.py")


@pytest.mark.parametrize("case", CELLS)
def test_a_warning_names_objects_in_shared_memory(cell: Cell, case: str) -> None:
    cell(CELLS[case])


class Study:
    """Study with the attribute of Optuna's that is read."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage


class InMemoryStorage:
    pass


def test_a_warning_says_that_an_optuna_study_is_a_copy(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(sys.modules, "optuna.study", types.SimpleNamespace(Study=Study))  # type: ignore[arg-type]
    storages = types.SimpleNamespace(InMemoryStorage=InMemoryStorage)
    monkeypatch.setitem(sys.modules, "optuna.storages", storages)  # type: ignore[arg-type]
    trial = types.SimpleNamespace(study=Study(InMemoryStorage()))
    Pickler(io.BytesIO(), says_copies=True).dump(Study("a file"))
    Pickler(io.BytesIO()).dump(trial)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="an Optuna study in memory is sent as a copy"):
        Pickler(io.BytesIO(), says_copies=True).dump(trial)

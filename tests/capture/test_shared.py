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


class Trial:
    """Trial with the attributes of Optuna's that are read."""

    def __init__(self, storage: Any) -> None:
        self.number, self.study = 3, types.SimpleNamespace(_storage=storage)


class InMemoryStorage:
    pass


def test_a_warning_says_that_an_optuna_trial_is_a_copy(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(sys.modules, "optuna.trial", types.SimpleNamespace(Trial=Trial))  # type: ignore[arg-type]
    storages = types.SimpleNamespace(InMemoryStorage=InMemoryStorage)
    monkeypatch.setitem(sys.modules, "optuna.storages", storages)  # type: ignore[arg-type]
    Pickler(io.BytesIO(), says_copies=True).dump(Trial("a file"))
    Pickler(io.BytesIO()).dump(Trial(InMemoryStorage()))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="trial 3 of an Optuna study in memory is sent as a copy"):
        Pickler(io.BytesIO(), says_copies=True).dump(Trial(InMemoryStorage()))

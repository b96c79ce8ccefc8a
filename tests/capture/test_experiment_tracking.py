"""Ranks continue the notebook's run of MLflow. A module with the part of its interface that is used stands for it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.capture import experiment_tracking


class Store(SimpleNamespace):
    """A stand-in for MLflow: one run is active, and each run has a status."""

    def __init__(self) -> None:
        super().__init__(active=None, status={}, autologged=[])
        self.sklearn = SimpleNamespace(autolog=lambda **options: self.autologged.append(options))

    def active_run(self) -> Any:
        return self.active and SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def start_run(self, run_id: str, log_system_metrics: bool) -> None:
        assert self.active is None
        self.active, self.status[run_id] = run_id, "RUNNING"

    def end_run(self, status: str) -> None:
        self.status[self.active], self.active = status, None

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(status=self.status[run_id]))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setitem(sys.modules, "mlflow", store)
    monkeypatch.setattr(experiment_tracking.atexit, "register", lambda *args: None)
    monkeypatch.setattr(experiment_tracking, "_set_up", {})
    return store


def test_a_rank_continues_the_run_of_the_notebook(mlflow: Store) -> None:
    experiment_tracking.write({"run": "a"}, {})
    assert mlflow.active == "a"
    mlflow.end_run("FINISHED")  # by a call, in this rank
    experiment_tracking.write({"run": "a"}, {"run": "a"})
    assert mlflow.active == "a"


def test_a_rank_leaves_a_run_with_the_status_of_the_notebook(mlflow: Store) -> None:
    experiment_tracking.write({"run": "a"}, {})
    mlflow.status["a"] = "FAILED"  # by the notebook
    experiment_tracking.write({"run": "b"}, {"run": "a"})
    assert (mlflow.active, mlflow.status) == ("b", {"a": "FAILED", "b": "RUNNING"})
    experiment_tracking.write({}, {"run": "b"})
    assert mlflow.active is None


def test_a_run_that_a_rank_has_started_itself_stays(mlflow: Store) -> None:
    mlflow.start_run("own", log_system_metrics=False)
    experiment_tracking.write({"run": "a"}, {})
    experiment_tracking.write({}, {"run": "a"})
    assert mlflow.active == "own"


def test_a_function_that_imports_mlflow_finds_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    experiment_tracking.write({"run": "a"}, {})
    assert os.environ["MLFLOW_RUN_ID"] == "a"
    experiment_tracking.write({}, {"run": "a"})
    assert "MLFLOW_RUN_ID" not in os.environ


def test_autologging_is_read_and_set_up_once(mlflow: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"disable": False}
    integrations = {"sklearn": options, "keras": {}, "spark": {"globally_configured": True}}
    module = SimpleNamespace(AUTOLOGGING_INTEGRATIONS=integrations)
    monkeypatch.setitem(sys.modules, "mlflow.utils.autologging_utils", module)
    found = experiment_tracking.read(sys)
    assert found == {"autolog": {"sklearn": options}}
    experiment_tracking.write(found, {})
    experiment_tracking.write(found, found)
    assert mlflow.autologged == [options]

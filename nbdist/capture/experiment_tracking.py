"""MLflow's active run and autologging: read in the notebook, continued in its ranks."""

from __future__ import annotations

import atexit
import operator
import os
import sys
from collections.abc import Mapping
from typing import Any

#: The run that MLflow continues when a process logs its first value.
_RUN_ID = "MLFLOW_RUN_ID"
#: What MLflow adds to the options of a library that `mlflow.autolog()` has set up.
_BY_ALL = "globally_configured"


def read(sys: Any) -> dict[str, Any]:
    """Return the id of the active run and the options of autologging by library, as far as there are any."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is None:
        return {}
    run = mlflow.active_run()
    integrations = getattr(sys.modules.get("mlflow.utils.autologging_utils"), "AUTOLOGGING_INTEGRATIONS", {})
    autolog = {
        name: dict(options) for name, options in list(integrations.items()) if options and _BY_ALL not in options
    }
    found = {"run": run and run.info.run_id, "autolog": autolog}
    return {name: value for name, value in found.items() if value}


def write(value: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    """Continue the notebook's run in this rank, and leave the one of the `last` value if it is another. Each call needs
    this, because an earlier one may have ended the run in this rank, or imported MLflow."""
    mlflow, run, before = sys.modules.get("mlflow"), value.get("run"), last.get("run")
    if before is not None and os.environ.get(_RUN_ID) == before:
        del os.environ[_RUN_ID]
    if mlflow is None:
        if run:
            os.environ[_RUN_ID] = run  # for a function that imports it
        return
    if before != run:
        _leave(before)
    if run and mlflow.active_run() is None:
        mlflow.start_run(run_id=run, log_system_metrics=False)
        atexit.register(_leave, run)
    for name, options in value.get("autolog", {}).items():
        if _set_up.get(name) != options:
            _set_up[name] = options
            owner = mlflow if name == "mlflow" else operator.attrgetter(name)(mlflow)
            owner.autolog(**options)


#: The options of autologging that this rank has.
_set_up: dict[str, Any] = {}


def _leave(run: str | None) -> None:
    """Leave a run in this process without a change of its status, which is the notebook's to set."""
    mlflow: Any = sys.modules["mlflow"]
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run:
        mlflow.end_run(mlflow.get_run(run).info.status)

"""Logs of a run outside the notebook: JSON lines, TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist

from ...replay.target import is_replay
from ..io.disk import sync
from .callbacks import Callback
from .history import History, Record, numbers

Logs: TypeAlias = str | Mapping[str, Any]
"""The name of a log, or a dict from name to target: a path, or a dict of options for the library."""


class _Sink(Protocol):
    """The interface of an open log."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a record."""

    def close(self) -> None:
        """Finish the log."""


class _JsonLines:
    """A file with a JSON object for each record. Numbers that JSON lacks, such as NaN, become null."""

    def __init__(self, step: int, path: str | os.PathLike[str] = "history.jsonl") -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if step and file.exists():  # those after the snapshot come again
            kept = [line for line in file.read_text().splitlines() if json.loads(line)["step"] <= step]
            scratch = file.with_name(f".{file.name}.tmp")
            scratch.write_text("".join(f"{line}\n" for line in kept))
            scratch.rename(file)
            sync(file.parent)
        self._file = open(file, "a" if step else "w")  # noqa: SIM115  # until `close`

    def write(self, step: int, values: Mapping[str, float]) -> None:
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **plain}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """A folder for TensorBoard; without a path, torch's default, a new folder in `runs`."""

    def __init__(self, step: int, path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        _require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge = {"purge_step": step + 1} if step else {}
        self._writer: Any = SummaryWriter(path and os.fspath(path), **purge, **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    """MLflow's active run; or a new run, with the options of `mlflow.start_run`."""

    def __init__(self, step: int, **options: Any) -> None:
        self._mlflow = _require("mlflow", "mlflow")
        self._own = self._mlflow.active_run() is None
        if self._own:
            self._mlflow.start_run(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        if self._own:
            self._mlflow.end_run()


class _Wandb:
    """The active run of Weights & Biases; or a new run, with the options of `wandb.init`."""

    def __init__(self, step: int, **options: Any) -> None:
        wandb = _require("wandb", "wandb")
        self._own = wandb.run is None
        self._run = wandb.init(**options) if self._own else wandb.run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._own:
            self._run.finish()


_KINDS: dict[str, Callable[..., _Sink]] = {
    "json_lines": _JsonLines,
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _Wandb,
}
_WITH_PATH = ("json_lines", "tensorboard")


def check_logs(log: Logs | None) -> dict[str, Any]:
    """Return the targets, by the name of the log, from the option `log` of `fit`.

    Raises:
        TypeError: The option is neither a name nor a dict of names.
        ValueError: There is no log with this name, or a JSON-lines file gets another option than its path.
        ImportError: The library of the log is not installed.
    """
    if log is None:
        return {}
    if not isinstance(log, (str, Mapping)):
        raise TypeError(f"`log` must be a name, or a dict from name to path or options, got {log!r}")
    found = {log: None} if isinstance(log, str) else dict(log)
    for name, where in found.items():
        if name not in _KINDS:
            raise ValueError(f"`log` must be one of {', '.join(_KINDS)}, got {name!r}")
        kinds = (str, os.PathLike, Mapping) if name in _WITH_PATH else (Mapping,)
        if where is not None and not isinstance(where, kinds):
            what = "a path or a dict of options" if name in _WITH_PATH else "a dict of options"
            raise TypeError(f"`log` must have {what} for {name!r}, got {where!r}")
        if name != "json_lines":
            _require(name, name)
        elif isinstance(where, Mapping) and (foreign := where.keys() - {"path"}):
            raise ValueError(f"`log` must have no other option than 'path' for 'json_lines', got {min(foreign)!r}")
    return found


def logging_of(log: Logs | None) -> Logging:
    """Check the option `log` on all ranks like `check_logs`, and return the logs of this rank. Only rank 0 has any, and
    none while a recorded step runs again."""
    logs = check_logs(log)
    return Logging(logs if dist.get_rank() == 0 and not is_replay() else {})


class Logging(Callback):
    """The logs of a run, which rank 0 writes.

    Args:
        logs: The result of `check_logs`.
    """

    def __init__(self, logs: Mapping[str, Any]) -> None:
        self._logs, self._sinks = logs, list[_Sink]()

    def on_start(self, model: Any, history: History) -> None:
        """Open the logs. Records that a resumed run had written after its snapshot are written again."""
        step = history[-1].step if len(history) else 0
        for name, where in self._logs.items():
            options = dict(where) if isinstance(where, Mapping) else {} if where is None else {"path": where}
            self._sinks.append(_KINDS[name](step, **options))

    def on_record(self, record: Record) -> None:
        """Write a record's numbers."""
        for sink in self._sinks:
            sink.write(record.step, {name: value for name, value in numbers(record).items() if name != "step"})

    def close(self) -> None:
        """Close the logs."""
        while self._sinks:
            self._sinks.pop().close()


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"`log` {package!r} needs the package {package}: pip install {package}") from error

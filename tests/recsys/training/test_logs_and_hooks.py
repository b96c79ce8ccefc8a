"""The logs and hooks of `fit`, and summaries of models."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from torch import nn

from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.metrics import AUC
from nbdist.recsys.models import PooledTables
from nbdist.recsys.parallel.replicated import replicate
from nbdist.recsys.raw_ids import RawIds
from nbdist.recsys.sharding import summary
from nbdist.recsys.training import Callback, Snapshots, fit
from nbdist.recsys.training.history import History, Record
from nbdist.recsys.training.logs import Logging, check_logs

pytestmark = pytest.mark.slow
WARM = "import nbdist.recsys.training, nbdist.recsys.models, nbdist.recsys.parallel.replicated"


def predict(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).squeeze(1), batch["liked"]


def train(**options: Any) -> History:
    """In a rank: train on rows of one label where `one` says so, whose AUC is NaN."""
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 100)[:, None]
    loader = MemoryLoader({"x": x, "liked": x[:, 0] > 0}, 5, shuffle=True, seed=1)
    model = replicate(nn.Linear(1, 1), lambda some: torch.optim.SGD(some, lr=0.1))
    return fit(model, predict, loader, loader, log_every=5, progress=False, metrics={"auc": AUC()}, **options)


def test_a_file_has_each_record_once_even_after_a_resume(sessions: Sessions, tmp_path: Path) -> None:
    file = tmp_path / "logs" / "run.jsonl"
    log = {"json_lines": file}

    def run(folder: str, steps: int, every: int) -> History:
        return train(steps=steps, log=log, snapshots=Snapshots(tmp_path / folder, every=every, resume=True))

    history = sessions[2].run(run, "one", 20, 10)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{name: one for name, one in row.items()} for row in history.frame.to_dict("records")]
    with open(file, "a") as text:  # of a run that was killed after its last snapshot
        text.write(json.dumps({"step": 25, "loss": 0.0}) + "\n")
    history = sessions[2].run(run, "one", 30, 10)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25, 30]
    assert lines[-2]["loss"] == history[-2].loss
    sessions[1].run(run, "another", 5, 5)  # a new run begins a new file
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [5]


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    logging = Logging(check_logs({"json_lines": {"path": tmp_path / "log"}}))
    logging.on_start(None, History())
    logging.on_record(Record(3, 0.5, 0.25, {"auc": math.nan}, [0.1, 0.2], 9.0))
    logging.close()
    expected = {"step": 3, "epoch": 0.5, "loss": 0.25, "auc": None, "lr": 0.1, "lr_2": 0.2, "rows_per_second": 9.0}
    assert json.loads((tmp_path / "log").read_text()) == expected


class Stub(types.ModuleType):
    """A library of runs that notes what it is asked for."""

    def __init__(self, name: str, active: bool) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.run = self if active else None
        for method in ("start_run", "log_metrics", "end_run", "init", "log", "finish"):
            setattr(self, method, lambda *args, method=method, **named: self.note(method, args, named))

    def note(self, method: str, args: Any, named: Any) -> Stub:
        self.calls.append((method, args, named))
        return self

    def active_run(self) -> Any:
        return self.run


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize(
    ("library", "verbs"), [("mlflow", "start_run log_metrics end_run"), ("wandb", "init log finish")]
)
def test_runs_of_libraries_are_begun_and_ended_unless_they_are_the_user_s(
    monkeypatch: pytest.MonkeyPatch, library: str, verbs: str, active: bool
) -> None:
    """Both libraries are stand-ins here: neither is among the tests' dependencies."""
    begin, write, end = verbs.split()
    stub = Stub(library, active)
    monkeypatch.setitem(sys.modules, library, stub)
    logging = Logging(check_logs({library: {"name": "clicks"}}))
    logging.on_start(None, History())
    logging.on_record(Record(3, 0.5, 0.25, {}, [0.1], 9.0))
    logging.close()
    values = {"epoch": 0.5, "loss": 0.25, "lr": 0.1, "rows_per_second": 9.0}
    expected: list[tuple[Any, ...]] = [(write, (values,), {"step": 3})]
    if not active:
        expected = [(begin, (), {"name": "clicks"}), *expected, (end, (), {})]
    assert stub.calls == expected


def test_hooks_are_called_on_every_rank_and_rank_0_may_stop(sessions: Sessions) -> None:
    class Noting(Callback):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_start(self, model: Any, history: History) -> None:
            self.calls.append(("start", len(history)))

        def on_step(self, step: int) -> None:
            self.calls.append(step)

        def on_record(self, record: Record) -> bool:
            self.calls.append(("record", record.step))
            return dist.get_rank() == 0 and record.step == 10

        def on_end(self, history: History) -> None:
            self.calls.append(("end", len(history)))

    def run() -> Any:
        noting = Noting()
        train(steps=30, callbacks=[noting])
        return noting.calls

    expected = [("start", 0), *range(1, 6), ("record", 5), *range(6, 11), ("record", 10), ("end", 2)]
    assert sessions[2].run_all(run) == [expected, expected]


def test_what_is_no_log_and_no_hook_is_refused_before_the_training(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for log, error, text in (
        ("csv", ValueError, "`log` must be one of json_lines, tensorboard, mlflow, wandb, got 'csv'"),
        (3, TypeError, "`log` must be a name, or a dict"),
        ({"mlflow": "folder"}, TypeError, "a dict of options for 'mlflow', got 'folder'"),
        ({"json_lines": 3}, TypeError, "a path or a dict of options for 'json_lines', got 3"),
        ({"json_lines": {"file": "x"}}, ValueError, "no other option than 'path' for 'json_lines', got 'file'"),
    ):
        with pytest.raises(error, match=text):
            check_logs(log)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="`log` 'wandb' needs the package wandb: pip install wandb"):
        check_logs("wandb")
    with pytest.raises(ValueError, match="`log` must be one of"):
        sessions[1].run(train, steps=1, log="csv")
    with pytest.raises(TypeError, match=r"must have instances of Callback, got <class .*: make one"):
        sessions[1].run(train, steps=1, callbacks=[Callback])
    with pytest.raises(TypeError, match=r"`callbacks` must be a list of callbacks, got <.*>: give \[<"):
        sessions[1].run(train, steps=1, callbacks=Callback())


def test_a_summary_says_where_ranks_have_what(sessions: Sessions) -> None:
    def run() -> Any:
        model = nn.ModuleDict(
            {
                "tables": PooledTables({"user": RawIds(), "movie": 9}, embedding_dim=4),
                "sparse": nn.Embedding(5, 4, sparse=True),
                "over": nn.Linear(8, 1),
            }
        )
        replicated = replicate(model, lambda some: torch.optim.Adagrad(some, lr=0.1))
        model["tables"]({"user": torch.tensor([7, 2**50, 3]) + dist.get_rank(), "movie": torch.tensor([1, 2, 3])})
        return summary(replicated), summary(replicated.gather()) if dist.get_rank() == 0 else replicated.gather()

    found, whole = sessions[2].run(run)
    parts = [(part.name.split(".")[-2], part.rows, part.bytes, part.strategy) for part in found.parts]
    assert parts == [
        ("user", 6, 96, "row_wise"),
        ("movie", 9, 144, "copied"),
        ("sparse", 5, 80, "shared"),
        ("over", None, 32, "copied"),
        ("over", None, 4, "copied"),
    ]
    assert found.bytes == whole.bytes == 356
    assert [part.strategy for part in whole.parts] == [""] * 5
    assert "row_wise" in found._repr_html_() and "6 × 4" in repr(found)
    with pytest.raises(TypeError, match="`model` must be a module, or the result of"):
        summary(3)  # type: ignore[arg-type]

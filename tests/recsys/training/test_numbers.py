"""Numbers at their edges in a run: learning rates, losses that are not finite, shapes that would be broadcast."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from clicks import build, loaders
from clicks import predict as of_clicks
from conftest import Sessions
from torch import nn
from torchmetrics import MeanMetric

from nbdist import NotFinite, Session
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.metrics import MRR, RMSE
from nbdist.recsys.models import SASRec, draw_rows
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import Snapshots, evaluate, fit, warmup_decay

pytestmark = pytest.mark.slow
WARM = "import torchrec.distributed"
X = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).float()


def linear() -> Any:
    torch.manual_seed(0)
    return replicate(nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def predict(model: Any, batch: Any) -> Any:
    return model(batch["x"]).squeeze(1), batch["y"]


def rows(y: torch.Tensor = Y) -> MemoryLoader:
    return MemoryLoader({"x": X, "y": y}, 5)


def test_a_schedule_is_asked_for_the_steps_of_the_run_alone(sessions: Sessions, tmp_path: Path) -> None:
    factors = [1.0, 1.0, 0.5, 0.5, 0.1]

    def run() -> list[float]:
        options: dict[str, Any] = {"steps": 5, "log_every": 1, "schedule": lambda step: factors[step]}
        snapshots = Snapshots(tmp_path / "run", every=5, resume=True)
        found = fit(linear(), predict, rows(), snapshots=snapshots, progress=False, **options)
        again = fit(linear(), predict, rows(), snapshots=snapshots, progress=False, **options)  # there is nothing to do
        assert len(again) == 5
        return [round(record.rates[0], 6) for record in found]

    assert sessions[2].run(run) == [0.1, 0.1, 0.05, 0.05, 0.01]


def test_rates_that_are_set_between_two_runs_count(sessions: Sessions) -> None:
    def run() -> list[float]:
        model, found = linear(), []
        for rate in (None, 0.02, None):
            for group in model.optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate
            history = fit(model, predict, rows(), steps=4, schedule=warmup_decay(4), progress=False)
            found += [history[-1].rates[0] / warmup_decay(4)(3), model.optimizer.param_groups[0]["lr"]]
        with pytest.raises(ZeroDivisionError):
            fit(model, predict, rows(), steps=4, schedule=lambda step: 1 / (2 - step), progress=False)
        return [*found, model.optimizer.param_groups[0]["lr"]]

    assert sessions[2].run(run) == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.02, 0.02, 0.02])


@pytest.mark.parametrize("how", ["sharded", "replicated"])
def test_a_rate_of_0_that_is_set_between_two_runs_moves_nothing(sessions: Sessions, how: str) -> None:
    def run() -> tuple[Any, Any, Any]:
        model = build(how, 0.0)
        states = []
        for rate in (None, 0.0, 0.1):
            for group in model.optimizer.param_groups:
                group["lr"] = group["lr"] if rate is None else rate
            fit(model, of_clicks, *loaders(200, 20, 3), steps=3, schedule=warmup_decay(3), progress=False)
            whole = model.gather()
            states.append({} if whole is None else {name: one.clone() for name, one in whole.state_dict().items()})
        return states[0], states[1], states[2]

    first, second, third = sessions[2].run(run)
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, atol=0, rtol=0)
    assert any(not torch.equal(third[name], values) for name, values in second.items())


@pytest.mark.parametrize("where", ["target", "prediction"])
def test_a_nan_stops_the_run_before_its_step(sessions: Sessions, tmp_path: Path, where: str) -> None:
    x, y = X.clone(), Y.clone()
    (x if where == "prediction" else y)[28] = math.nan

    def run() -> tuple[str, bool, list[str]]:
        model, snapshots = linear(), Snapshots(tmp_path / where, every=1)
        with pytest.raises(ValueError) as caught:
            fit(model, predict, MemoryLoader({"x": x, "y": y}, 5), steps=10, snapshots=snapshots, progress=False)
        finite = all(parameter.isfinite().all() for parameter in model.module.parameters())
        return str(caught.value), finite, [path.name for path in snapshots.all()]

    said, finite, kept = sessions[1].run(run)
    assert said.startswith(f"the loss of step 6 is not finite: row 3 of the batch of rank 0 has a {where} that is nan")
    assert finite and kept == ["step-4", "step-5"]


def test_shapes_that_would_be_broadcast_are_refused(sessions: Sessions) -> None:
    def run() -> list[str]:
        said = []
        for y, squeezed in ((Y, False), (Y[:, None], True), (Y.long(), False)):

            def columns(model: Any, batch: Any, squeezed: bool = squeezed) -> Any:
                found = model(batch["x"])
                return found.squeeze(1) if squeezed else found, batch["y"]

            metrics = {"rmse": RMSE()}
            for loss in (nn.functional.mse_loss, lambda predictions, targets: (predictions - targets).square().mean()):
                with pytest.raises(ValueError) as caught:
                    fit(linear(), columns, rows(y), rows(y), steps=2, loss=loss, metrics=metrics, progress=False)
                said.append(str(caught.value))
        fit(linear(), lambda *args: predict(*args), MemoryLoader({"x": X[:3], "y": Y[:3]}, 1), steps=2, progress=False)
        return said

    (said,) = sessions[1].run_all(run)
    for text, shapes in zip(said[::2], ("(5, 1) and (5,)", "(5,) and (5, 1)", "(5, 1) and (5,)"), strict=True):
        assert f"predictions and targets must have one shape, got {shapes}" in text


def test_histories_of_one_item_have_no_loss(sessions: Sessions) -> None:
    """Alone they have none; among others they change nothing in it."""
    long, short = [[2, 3, 4, 5]] * 4, [[6]] * 4

    def losses(lists: list[list[int]]) -> list[float]:
        torch.manual_seed(0)
        items = {"movie": torch.arange(2, 12)}
        values = torch.tensor([value for one in lists for value in one])
        offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
        model = SASRec(12, length=4, embedding_dim=8, blocks=1, dropout=0.0)
        parallel = replicate(model, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        drawn = draw_rows(items, 8, torch.Generator().manual_seed(0))["movie"]

        def next_item(model: Any, batch: Any) -> Any:
            return model(batch, drawn)

        loader = MemoryLoader({"history": Ragged(values, offsets)}, 2)
        loss = nn.functional.cross_entropy
        history = fit(parallel, next_item, loader, epochs=1, loss=loss, progress=False)
        return [record.loss for record in history]

    for nranks in (1, 2):
        alone, mixed, only = (sessions[nranks].run(losses, lists) for lists in (long, long + short, short))
        assert mixed == pytest.approx(alone) and only == [0.0]


def test_a_metric_without_a_direction_chooses_nothing(sessions: Sessions, tmp_path: Path) -> None:
    class Means(MeanMetric):
        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            super().update(preds)

    def run() -> None:
        for options in ({"snapshots": Snapshots(tmp_path / "run", keep_best="mean")}, {"patience": 1}):
            with pytest.raises(
                ValueError, match="uses 'mean', and Means does not define whether larger values are better"
            ):
                fit(linear(), predict, rows(), rows(), steps=1, metrics={"mean": Means()}, progress=False, **options)

    sessions[1].run(run)


def test_nan_predictions_are_refused_by_any_metric(sessions: Sessions) -> None:
    class Means(MeanMetric):
        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            super().update(preds)

    def broken(model: Any, batch: Any) -> Any:
        return torch.where(torch.arange(5) == 2, math.nan, model(batch["x"]).squeeze(1)), batch["y"], batch["y"].long()

    def run() -> None:
        for metric, said in ((Means(), "got NaN in row 2 of a batch of rank 0"), (MRR(), "the first is nan in row 2")):
            with pytest.raises(ValueError, match=said):
                evaluate(linear(), broken, rows(), {"metric": metric})

    sessions[1].run(run)


class Priced(nn.Module):
    """A click model that takes the logarithm of a price."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 4)
        self.dense = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.dense(torch.cat([self.user(batch["user"]), batch["price"].log()[:, None]], 1))
        return found.squeeze(1)


def priced(value: float, rate: float = 1e-2, **options: Any) -> None:
    """In a rank: train on 2,000 rows; row 1234 has this price."""
    torch.manual_seed(0)
    price = torch.rand(2000) + 1
    price[1234] = value
    ids = torch.arange(2000)
    columns = {"user": ids % 50, "raw_user": ids + 10**9, "price": price, "y": torch.rand(2000) > 0.5}
    model = replicate(Priced(), lambda parameters: torch.optim.Adam(parameters, lr=rate))
    rows = MemoryLoader(columns, 50)
    fit(model, lambda model, batch: (model(batch), batch["y"]), rows, epochs=1, progress=False, **options)


def test_a_row_is_named_with_its_raw_ids(sessions: Sessions) -> None:
    for precision in ("fp32", "bf16"):
        with pytest.raises(NotFinite, match=r"the result of log is not finite at .*, in module `Priced`") as caught:
            sessions[2].run(priced, 0.0, check="nan", precision=precision)
        error = caught.value
        assert (error.step, error.rank, error.kind, error.rows) == (5, 1, "loss", [34]), error
        assert error.values == [{"user": 34, "raw_user": 1_000_001_234, "price": 0.0, "y": True}]
        assert "Row 34: user=34, raw_user=1000001234, price=0.0, y=True." in str(error)
    with pytest.raises(NotFinite, match=r"the batch has nan in column `price`"):
        sessions[2].run(priced, float("nan"), check="nan")
    with pytest.raises(NotFinite, match=r"the loss of step 2 is (nan|inf) .*in module `dense.0`") as caught:
        sessions[2].run(priced, 1.0, 1e20, check="nan")
    assert "a lower learning rate" in str(caught.value)


class Rooted(nn.Module):
    """A model whose gradient, not its result, is not finite for a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * self.weight).sum(1).sqrt()


def test_each_batch_of_a_step_is_searched(sessions: Sessions) -> None:
    """The first of the 2 batches of step 6 has the row."""

    def run() -> NotFinite:
        x = X.clone()
        x[50 + 3] = 0.0
        model = replicate(Rooted(), lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        options: dict[str, Any] = {"loss": nn.functional.mse_loss, "gradient_accumulation_steps": 2}
        rows = MemoryLoader({"x": x, "y": Y}, 5)
        with pytest.raises(NotFinite) as caught:
            fit(model, lambda model, batch: (model(batch["x"]), batch["y"]), rows, epochs=1, check="nan", **options)
        return caught.value

    error = sessions[1].run(run)
    assert (error.kind, error.step, error.op, error.rows) == ("gradient", 6, "sqrt", [3]), error
    assert error.module == "Rooted" and error.values[0]["x"] == [0.0, 0.0], error


def test_fit_checks_as_the_call_does() -> None:
    with Session(2, devices="cpu", check="nan") as own:
        with pytest.raises(NotFinite) as caught:
            own.run(priced, 0.0)
        assert caught.value.values[0]["raw_user"] == 1_000_001_234
        assert own.run(priced, 1.0) is None


def test_a_check_that_there_is_not(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="`check` must be \"nan\" or None, got 'nans'"):
        sessions[2].run(priced, 1.0, check="nans")

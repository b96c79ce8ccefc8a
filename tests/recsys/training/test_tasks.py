"""Several tasks, weights of rows and masks: the gradients, losses and metrics belong to all rows of all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import Sessions
from torch import nn

from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.metrics import AUC, RMSE, LogLoss
from nbdist.recsys.models import PLE, MMoE
from nbdist.recsys.parallel.replicated import replicate
from nbdist.recsys.training import evaluate, fit
from nbdist.recsys.training.objective import log_loss

pytestmark = pytest.mark.slow
WARM = "import nbdist.recsys.training, nbdist.recsys.models, nbdist.recsys.parallel.replicated"
LOSSES = {"click": log_loss, "rating": nn.functional.mse_loss}


def columns() -> dict[str, torch.Tensor]:
    """Return 40 rows; their weights, and which ratings are known, differ between the halves that two ranks have."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(40, 3, generator=draw)
    known = (torch.arange(40) % 5 == 0) | (torch.arange(40) > 30)
    rating = torch.where(known, x[:, 1], math.nan)
    weight = torch.arange(40) % 4 * 0.5
    clicked = torch.where(weight > 0, (x[:, 0] > 0).float(), math.nan)
    return {"x": x, "click": clicked, "rating": rating, "weight": weight, "known": known}


class Two(nn.Module):
    """A layer for each task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.click, self.rating = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"click": self.click(batch["x"]).squeeze(1), "rating": self.rating(batch["x"]).squeeze(1)}


def both(model: nn.Module, batch: Any) -> Any:
    return {task: (found, batch[task]) for task, found in model(batch).items()}


def trained(batch_size: int, **options: Any) -> Any:
    model = replicate(Two(), lambda some: torch.optim.SGD(some, lr=0.5))
    loader = MemoryLoader(columns(), batch_size)
    history = fit(
        model,
        both,
        loader,
        MemoryLoader(columns(), 7),
        epochs=3,
        loss=LOSSES,
        sample_weight={"click": "weight", "rating": "known"},
        metrics={"click": {"loss": LogLoss(logits=True), "auc": AUC()}, "rating": {"rmse": RMSE()}},
        progress=False,
        **options,
    )
    return history, model.gather()


def by_hand() -> tuple[Two, list[float]]:
    """Train on all rows in each step, in one process, with sums written out."""
    model, rows = Two(), columns()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    some, weights = rows["weight"] > 0, rows["weight"]
    for _ in range(3):
        found = model(rows)
        each = nn.functional.binary_cross_entropy_with_logits(
            found["click"][some], rows["click"][some], reduction="none"
        )
        error = (found["rating"] - rows["rating"])[rows["known"]].square()
        loss = (each * weights[some]).sum() / weights.sum() + error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return model, losses


@pytest.mark.parametrize(("ranks", "batch", "batches"), [(1, 40, 1), (2, 20, 1), (2, 5, 4), (1, 10, 4)])
def test_a_step_minimizes_the_mean_by_weight_over_all_rows(
    sessions: Sessions, ranks: int, batch: int, batches: int
) -> None:
    expected, losses = by_hand()
    history, model = sessions[ranks].run(trained, batch, gradient_accumulation_steps=batches)
    for name, parameter in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], parameter)
    assert [one.loss for one in history] == pytest.approx(losses)
    rows, found = columns(), expected(columns())
    assert history[-1].metrics["rating/rmse"] == pytest.approx(
        float((found["rating"] - rows["rating"])[rows["known"]].square().mean().sqrt())
    )
    some = rows["weight"] > 0
    assert history[-1].metrics["click/loss"] == pytest.approx(
        float(log_loss(found["click"][some], rows["click"][some], rows["weight"][some]))
    )
    assert list(history[-1].metrics) == ["click/loss", "click/auc", "rating/rmse"]


def test_one_task_has_weights_too(sessions: Sessions) -> None:
    def train(**options: Any) -> Any:
        model = replicate(Two().click, lambda some: torch.optim.SGD(some, lr=0.5))

        def predict(module: nn.Module, batch: Any) -> Any:
            return module(batch["x"]).squeeze(1), batch["click"]

        loader = MemoryLoader(columns(), 20)
        history = fit(model, predict, loader, loader, steps=3, sample_weight="weight", progress=False, **options)
        found = evaluate(model, predict, loader, {"auc": AUC()}, sample_weight="weight")
        return history, model.gather(), found

    history, model, found = sessions[2].run(train)
    torch.testing.assert_close(model.weight, by_hand()[0].click.weight)
    assert found["auc"] == history[-1].metrics["auc"]

    def half(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return log_loss(predictions, targets) / 2

    with pytest.raises(TypeError, match="`loss` must take predictions, targets and weights"):
        sessions[1].run(train, loss=half, metrics={"auc": AUC()})


@pytest.mark.parametrize("kind", [MMoE, PLE])
def test_experts_learn_both_tasks(sessions: Sessions, kind: Any) -> None:
    def train() -> Any:
        torch.manual_seed(0)
        user, item = torch.arange(800) % 20, torch.arange(800) // 7 % 9
        rows = {"user": user, "item": item, "age": user / 20, "like": user % 2 == item % 2, "buy": item > 4}
        model = kind(["like", "buy"], {"user": 20, "item": 9}, ["age"], embedding_dim=8, expert_mlp=[16])
        model = replicate(model, "adagrad", lr=0.2)
        loader = MemoryLoader(rows, 50, shuffle=True, seed=1)

        def predict(module: nn.Module, batch: Any) -> Any:
            return {task: (found, batch[task]) for task, found in module(batch).items()}

        losses = {"like": log_loss, "buy": log_loss}
        return fit(model, predict, loader, loader, epochs=10, loss=losses, progress=False)[-1].metrics

    found = sessions[2].run(train)
    assert list(found) == ["like/valid_loss", "like/auc", "buy/valid_loss", "buy/auc"]
    assert found["like/auc"] > 0.95 and found["buy/auc"] > 0.95


def test_levels_of_experts() -> None:
    model = PLE(["a", "b"], {"user": 3}, embedding_dim=4, levels=2, shared_experts=1, task_experts=3)
    sum(one.sum() for one in model({"user": torch.tensor([0, 1, 2])}).values()).backward()  # type: ignore[union-attr]
    assert all(parameter.grad is not None for parameter in model.parameters())  # or DistributedDataParallel would wait
    with pytest.raises(ValueError, match="`tasks` must be names"):
        MMoE("click", {"user": 3})
    with pytest.raises(ValueError, match="no task can have the name 'items'"):
        MMoE(["items"], {"user": 3})


def test_what_makes_no_sense_is_refused(sessions: Sessions) -> None:
    def train(loss: Any = LOSSES, predict: Any = both, metrics: Any = None, **options: Any) -> None:
        model = replicate(Two(), lambda some: torch.optim.SGD(some, lr=0.5))
        loader = MemoryLoader(columns(), 20)
        fit(model, predict, loader, steps=1, loss=loss, metrics=metrics, progress=False, **options)

    def one(model: nn.Module, batch: Any) -> Any:
        return both(model, batch)["click"]

    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (ValueError, "must return the tasks click, rating, like `loss`, got no named tasks", {"predict": one}),
        (ValueError, "returns the tasks click, rating: give a dict from task to loss", {"loss": log_loss}),
        (TypeError, "`loss` must be a function, or a dict", {"loss": {"click": 1}}),
        (ValueError, "has 'buy', which is no task", {"sample_weight": {"buy": "weight"}}),
        (TypeError, "`sample_weight` must be a column", {"sample_weight": 3}),
        (ValueError, "the batch has no column 'none' with one number per row", {"sample_weight": "none"}),
        (ValueError, "got nan in row 1", {"sample_weight": "rating"}),
        (TypeError, "must have a dict for each task", {"metrics": {"click": {"auc": AUC()}, "auc": AUC()}}),
        (ValueError, "the loss of step 1 of task 'click' is not finite", {"sample_weight": {"rating": "known"}}),
    ]
    for error, text, options in cases:
        with pytest.raises(error, match=text):
            sessions[1].run(train, **options)

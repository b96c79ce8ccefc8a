"""A step of a recorded learner runs again in this process, and has the same losses and gradients, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.tracker import ReduceLROnPlateau
from fastai.callback.training import GradientAccumulation
from fastai.collab import CollabDataLoaders, collab_learner

from nbdist import Session, replay_step, warm
from nbdist.fastai import RecordSteps, fast
from nbdist.recsys.datasets import synthetic_ratings

pytestmark = pytest.mark.slow

IMPORTS = "from fastai.collab import *\nfrom fastai.distributed import *"
STEPS = 1 + 3 * 40


class Note(Callback):
    """Loss and gradients of each step."""

    def __init__(self, sink: list[Any]) -> None:
        self.sink = sink

    def after_backward(self) -> None:
        self.sink.append((self.learn.loss_grad.item(), [one.grad.clone() for one in self.learn.model.parameters()]))


def train(ratings: Any, quick: bool, folder: Path, sink: list[Any]) -> list[Any]:
    dls = CollabDataLoaders.from_df(ratings, bs=20)
    learn = collab_learner(dls, y_range=(0, 5.5), n_factors=8, cbs=[Note(sink), RecordSteps(folder)])
    learn = fast(learn) if quick else learn
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():  # type: ignore[attr-defined]
        learn.fit(1, 1e-3)
        learn.fit_one_cycle(2, 5e-3, wd=0.1)  # type: ignore[attr-defined]
    return sink


class Relative(Callback):
    """Divides each loss by the moving average of the losses so far."""

    def before_fit(self) -> None:
        self.mean: Any = None

    def after_loss(self) -> None:
        if self.training:
            loss = self.learn.loss_grad.detach()
            self.mean = loss if self.mean is None else 0.9 * self.mean + 0.1 * loss
            self.learn.loss_grad = self.learn.loss_grad / self.mean


KINDS = {
    "a count": lambda: GradientAccumulation(n_acc=70),
    "the best loss": lambda: ReduceLROnPlateau(monitor="train_loss", patience=0, min_delta=10.0),
    "a tensor": Relative,
}


def train_with(kind: str, ratings: Any, folder: Path, sink: list[Any]) -> list[Any]:
    dls = CollabDataLoaders.from_df(ratings, bs=20)
    learn = collab_learner(dls, y_range=(0, 5.5), n_factors=8, cbs=[Note(sink), KINDS[kind](), RecordSteps(folder)])
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():  # type: ignore[attr-defined]
        learn.fit(1, 1e-3)
        learn.fit(2, 5e-3)
    return sink


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_other_callbacks_are_those_of_the_training(kind: str, session: Session, tmp_path: Path) -> None:
    warm(IMPORTS)
    ratings = synthetic_ratings(n_users=50, n_items=40, n_ratings=1000).frame.to_pandas()
    [_, recorded] = session.run_all(train_with, kind, ratings, tmp_path / "run", [], imports=IMPORTS)
    step, sink = len(recorded) - 3, []  # in the second epoch of the second training
    found = replay_step(
        tmp_path / "run", train_with, kind, ratings, tmp_path / "run", sink, step=step, rank=1, imports=IMPORTS
    )
    assert found.same is True and len(sink) == 1, found
    loss, gradients = recorded[step - 1]
    assert sink[0][0] == loss and all(map(torch.equal, sink[0][1], gradients))


@pytest.mark.parametrize(
    ("quick", "steps"),
    [(True, 2), (False, 2), pytest.param(False, 20, marks=pytest.mark.long("20 steps, each on fresh ranks"))],
)
def test_steps_are_equal_bit_for_bit(quick: bool, steps: int, session: Session, tmp_path: Path) -> None:
    warm(IMPORTS)
    ratings = synthetic_ratings(n_users=50, n_items=40, n_ratings=2000).frame.to_pandas()
    recorded = session.run_all(train, ratings, quick, tmp_path / "run", [], imports=IMPORTS)
    for step in random.Random(3).sample(range(1, len(recorded[0]) + 1), steps):
        rank, sink = step % 2, []
        found = replay_step(
            tmp_path / "run", train, ratings, quick, tmp_path / "run", sink, step=step, rank=rank, imports=IMPORTS
        )
        assert found.same is True and len(sink) == 1, found
        loss, gradients = recorded[rank][step - 1]
        assert sink[0][0] == loss and all(map(torch.equal, sink[0][1], gradients))

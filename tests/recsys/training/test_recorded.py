"""A step of `fit` runs again in this process, and has the same losses and gradients, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from clicks import build, loaders, noisy

from nbdist import Recording, Session, replay_step, warm
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.metrics import AUC
from nbdist.recsys.models import PooledTables
from nbdist.recsys.raw_ids import RawIds
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import Snapshots, fit, warmup_decay
from nbdist.recsys.training.objective import log_loss

pytestmark = pytest.mark.slow

STEPS = 60


def train(how: str, folder: Path, sink: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Loss and gradients of each step."""
    model = build(how, dropout=0.1)
    gradients: list[Any] = sink.setdefault("gradients", [])

    def loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = log_loss(predictions, targets)
        if found.requires_grad:
            sink.setdefault("losses", []).append(found.item())
            gradients.append({})
        return found

    def keep(*_: Any) -> None:
        """Keep the gradients, however many optimizers call this in a step."""
        plain = {name: one for name, one in model.model.named_parameters() if type(one) is torch.nn.Parameter}
        gradients[-1] |= {name: one.grad.clone() for name, one in plain.items() if one.grad is not None}

    model.optimizer.register_step_pre_hook(keep)
    fit(
        model,
        noisy,
        *loaders(3000, 64),
        steps=steps,
        log_every=20,
        loss=loss,
        metrics={"auc": AUC()},
        schedule=warmup_decay(steps, warmup=10),
        snapshots=Snapshots(folder / "snapshots", every=25),
        record=folder / "recorded",
        progress=False,
    )
    return sink


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("replicated", 2),
        pytest.param("sharded", 20, marks=pytest.mark.long("20 steps, each on fresh ranks")),
    ],
)
def test_steps_are_equal_bit_for_bit(how: str, steps: int, session: Session, tmp_path: Path) -> None:
    warm("import torchrec.distributed")
    recorded = session.run_all(train, how, tmp_path, {})
    before = sorted(tmp_path.joinpath("snapshots").iterdir())
    for step in random.Random(2).sample(range(1, STEPS + 1), steps):
        rank, sink = step % 2, {}
        found = replay_step(tmp_path / "recorded", train, how, tmp_path, sink, step=step, rank=rank)
        assert found.same is True and len(sink["losses"]) == 1, found
        assert sink["losses"][0] == recorded[rank]["losses"][step - 1]
        own = recorded[rank]["gradients"][step - 1]
        assert own and own.keys() == sink["gradients"][-1].keys()
        assert all(torch.equal(one, sink["gradients"][-1][name]) for name, one in own.items())
    assert sorted(tmp_path.joinpath("snapshots").iterdir()) == before, "those of the run itself are left alone"


def test_a_folder_with_a_recording_is_refused(session: Session, tmp_path: Path) -> None:
    session.run(train, "replicated", tmp_path / "one", {}, 11)
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "recorded").rename(tmp_path / "two" / "recorded")
    with pytest.raises(ValueError, match="the folder of a recording must not hold one already"):
        session.run(train, "replicated", tmp_path / "two", {}, 11)


class Rated(torch.nn.Module):
    """A model with tables of raw ids."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"user": RawIds(capacity=200, admit_after=2), "item": RawIds(capacity=100)}
        self.tables = PooledTables(sizes, embedding_dim=8)
        self.dropout, self.last = torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.last(self.dropout(self.tables(batch))).squeeze(1)  # type: ignore[no-any-return]


def train_raw(folder: Path, losses: list[float]) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    users, items = (torch.randint(0, size, (3000,), generator=draw) * 7919**2 for size in (900, 500))
    rows = {"user": users.numpy(), "item": items.numpy(), "target": torch.rand(3000, generator=draw).numpy()}

    def loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = (predictions - targets).square().mean()
        losses.append(found.item())
        return found

    torch.manual_seed(0)
    model = replicate(Rated(), "adagrad", lr=0.05)
    loader = MemoryLoader(pl.DataFrame(rows), 32, shuffle=True, seed=3)
    fit(model, lambda m, b: (m(b), b["target"]), loader, epochs=2, loss=loss, record=folder, progress=False)
    return losses


def test_rows_of_raw_ids_are_those_of_the_training(session: Session, tmp_path: Path) -> None:
    recorded = session.run_all(train_raw, tmp_path / "recorded", [])
    for step in (30, len(recorded[1]) - 3):  # some rows were evicted by then
        losses: list[float] = []
        found = replay_step(tmp_path / "recorded", train_raw, tmp_path / "recorded", losses, step=step, rank=1)
        assert found.same is True and losses == [recorded[1][step - 1]], found


def test_a_loop_with_a_table_of_raw_ids_is_told_how_to_record(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"Recording cannot restore a RawTable .*: train it with .*fit\(\.\.\., record="
    ):
        Recording(tmp_path / "recorded", Rated())

"""Loaders on real ranks: with plain PyTorch, fastai's `distrib_ctx` and accelerate, rows are divided once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner

from nbdist import Session, in_ddp
from nbdist.recsys.datasets import synthetic_ratings
from nbdist.recsys.loader import MemoryLoader, ParquetLoader

pytestmark = pytest.mark.slow

RANKS = 3
IMPORTS = "from fastai.collab import *\nfrom fastai.distributed import *"


@pytest.fixture(scope="module")
def ratings() -> pd.DataFrame:
    return synthetic_ratings(n_users=300, n_items=400, n_ratings=10_001).with_titles().to_pandas()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, ratings: pd.DataFrame) -> Path:
    folder = tmp_path_factory.mktemp("ratings")
    table = pa.Table.from_pandas(ratings[["user", "movie", "rating"]]).append_column("row", pa.array(range(10_001)))
    for i in range(4):
        part = table.slice(2600 * i, 2600)
        pq.write_table(part, folder / f"{i}.parquet", row_group_size=500)
    return folder


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_an_epoch(session: Session, files: Path, whole: bool, shuffle: bool) -> None:
    def fn() -> list[list[torch.Tensor]]:
        loader = ParquetLoader(files, 64, columns=["row"], shuffle=shuffle)
        if not whole:
            loader.whole, loader.window = False, 50_000
        epochs = []
        for _ in range(2):
            batches = []
            for batch in loader:
                torch.distributed.barrier()  # would hang on unequal steps
                batches.append(batch["row"])
            epochs.append(batches)
        return epochs

    ranks = session.run_all(fn)
    for epoch in range(2):
        assert {len(rank[epoch]) for rank in ranks} == {-(-10_001 // (3 * 64))}
        assert sorted(row for rank in ranks for batch in rank[epoch] for row in batch.tolist()) == list(range(10_001))
    same = all(torch.equal(a, b) for rank in ranks for a, b in zip(*rank, strict=True))
    assert same is not shuffle


def test_ranks_with_different_numbers_of_rows_are_refused(session: Session, files: Path) -> None:
    def fn() -> None:
        rank = torch.distributed.get_rank()
        MemoryLoader((torch.arange(100 + 10 * rank),), 8)

    with pytest.raises(ValueError, match="rows is 100 on rank 0 and 110 on rank 1"):
        session.run(fn)


def test_a_seed_that_is_not_given_is_agreed_upon(session: Session) -> None:
    def fn() -> int:
        torch.manual_seed(torch.distributed.get_rank())
        return MemoryLoader((torch.arange(100),), 8, shuffle=True).seed

    assert len(set(session.run_all(fn))) == 1


def test_a_share_can_be_given(session: Session) -> None:
    def fn() -> int:
        return sum(len(x) for (x,) in MemoryLoader((torch.arange(100),), 8, rank=0, world_size=1))

    assert session.run_all(fn) == [100, 100, 100]


# --- fastai ---


class Seen(Callback):
    """Notes the rows that the model is trained and validated on."""

    def before_fit(self) -> None:
        self.rows: tuple[list[float], list[float]] = ([], [])

    def before_batch(self) -> None:
        self.rows[not self.training].extend(self.x.flatten().tolist())


@pytest.mark.parametrize("rows", [640, 650])
def test_distrib_ctx_divides_once(session: Session, rows: int) -> None:
    def fn() -> tuple[list[float], list[float], torch.Tensor, torch.Tensor, float]:
        x = torch.arange(rows).float()[:, None]
        train, valid = MemoryLoader((x, x), 32, shuffle=True), MemoryLoader((x, 2 * x), 50)
        dls = DataLoaders(train, valid, device="cpu")
        learn, seen = Learner(dls, torch.nn.Linear(1, 1), loss_func=torch.nn.MSELoss()), Seen()
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
            learn.fit(2, 1e-9, cbs=seen)
            loss = float(learn.recorder.values[-1][1])
            predictions, targets = learn.get_preds()
        assert learn.dls.train is train
        return *seen.rows, predictions, targets, loss

    ranks = session.run_all(fn, imports=IMPORTS)
    for part in (0, 1):
        assert sorted(row for rank in ranks for row in rank[part]) == sorted(2 * list(range(rows)))
    for _, _, predictions, targets, loss in ranks:
        # Gathered from all ranks, each row once and in the order of the data.
        assert targets.flatten().tolist() == [2.0 * row for row in range(rows)]
        assert predictions.argsort(0).flatten().tolist() in ([*range(rows)], [*reversed(range(rows))])
        assert loss == pytest.approx(ranks[0][4], rel=0.01)


def learner(ratings: pd.DataFrame, batch_size: int) -> Learner:
    from fastai.collab import EmbeddingDotBias
    from fastai.losses import MSELossFlat

    x = torch.tensor(ratings[["user", "movie"]].to_numpy())
    y = torch.tensor(ratings["rating"].to_numpy(), dtype=torch.float32)[:, None]
    train = MemoryLoader((x[:8000], y[:8000]), batch_size, shuffle=True, seed=1)
    valid = MemoryLoader((x[8000:], y[8000:]), 300)
    torch.manual_seed(0)
    model = EmbeddingDotBias(10, 301, 401, y_range=(0, 5.5))
    return Learner(DataLoaders(train, valid, device="cpu"), model, loss_func=MSELossFlat())


def test_a_learner_trains_and_returns(session: Session, ratings: pd.DataFrame) -> None:
    def train(batch_size: int) -> Learner:
        learn = learner(ratings, batch_size)
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
            learn.fit(1, 0.01)  # with more it learns the rows by heart, and the seed decides more than the ranks do
        return learn

    learn = session.run(train, 20, imports=IMPORTS)
    assert isinstance(learn.dls.train, MemoryLoader) and len(learn.dls.train) == 400, "all of it, not a rank's share"
    at_the_end = learn.recorder.values[-1][1]
    predictions, targets = learn.get_preds()
    assert len(predictions) == 2001
    loss = float(((predictions - targets.flatten()) ** 2).mean())
    assert loss == pytest.approx(at_the_end, rel=0.01)
    alone = in_ddp(0, train, 60, imports=IMPORTS)
    assert loss == pytest.approx(alone.recorder.values[-1][1], rel=0.03)  # in another order
    assert loss < 0.85 * float(targets.var())


# --- accelerate ---


def test_accelerate_leaves_it_alone_and_takes_the_last_step(session: Session) -> None:
    def fn() -> tuple[list[int], int, int]:
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
        x = torch.arange(100).float()[:, None]
        loader = MemoryLoader((x, x), 5, shuffle=True)
        model = torch.nn.Linear(1, 1)
        model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), loader)
        assert prepared is loader
        rows, steps = [], 0
        for x, y in prepared:
            rows += x.flatten().int().tolist()
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
        return rows, steps, len(prepared)

    ranks = session.run_all(fn)
    assert sorted(row for rows, _, _ in ranks for row in rows) == list(range(100))
    assert {steps for _, steps, _ in ranks} == {2} and {length for _, _, length in ranks} == {7}
    assert np.unique([len(rows) for rows, _, _ in ranks]).tolist() == [33, 34]

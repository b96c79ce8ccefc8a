"""Batch norm under sharding: all ranks have one model, as they have where it is replicated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from nbdist import Session
from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.metrics import RMSE
from nbdist.recsys.sharding import replicate, shard
from nbdist.recsys.training import evaluate

pytestmark = pytest.mark.slow

WARM = "import torchrec.distributed"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="user", num_embeddings=40, embedding_dim=8, feature_names=["user"])
        self.tables = EmbeddingBagCollection(tables=[table])
        self.over = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.over(self.tables(keyed_jagged(batch, ["user"])).values()).squeeze(1)


def rows() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    user = torch.randint(40, (640,), generator=draw).sort().values  # each rank has other users
    return {"user": user, "score": torch.rand(640, generator=draw) + user / 10}


def predict(module: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return module(batch), batch["score"]


def train(how: str, folder: Path | None = None) -> tuple[dict[str, torch.Tensor], float, Any]:
    """In a rank: 20 steps; then the buffers that the rank's model has in use, a metric, and the gathered model."""
    torch.manual_seed(1)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    model: Any
    if how == "replicated":
        model = replicate(Normed(), sgd)
    else:
        strategies = {"*": "row_wise"}
        model = shard(Normed(), strategies, batch_size=16, optimizer="sgd", lr=0.01, dense_optimizer=sgd)
    for batch in MemoryLoader(rows(), 16):
        model.optimizer.zero_grad()
        predictions, targets = predict(model.model, batch)
        nn.functional.mse_loss(predictions, targets).backward()
        model.optimizer.step()
    if folder is not None:
        model.save(folder)
    found = evaluate(model, predict, MemoryLoader(rows(), 16), {"rmse": RMSE()})["rmse"]
    buffers = {name: buffer.clone() for name, buffer in model.model.module.named_buffers() if name.startswith("over")}
    return buffers, found, model.gather()


def test_batch_norm_is_equal_on_ranks_sharded_or_replicated(session: Session) -> None:
    (first, found, model), (second, *_) = session.run_all(train, "sharded")
    assert len(first) == 3 and int(first["over.1.num_batches_tracked"]) == 20
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    replicated, there, _ = session.run(train, "replicated")
    torch.testing.assert_close(first, replicated, rtol=0, atol=1e-5)
    assert found == pytest.approx(there, abs=1e-5)
    with torch.no_grad():
        (batch,) = MemoryLoader(rows(), 640)
        predictions, targets = predict(model.eval(), batch)
    assert found == pytest.approx(float(nn.functional.mse_loss(predictions, targets).sqrt()), abs=1e-5)


@pytest.mark.parametrize("how", ["sharded", "replicated"])
def test_saved_buffers_are_those_of_rank_0(session: Session, tmp_path: Path, how: str) -> None:
    (_, _, model), _ = session.run_all(train, how, tmp_path)

    def load() -> dict[str, torch.Tensor]:
        dense = lambda p: torch.optim.SGD(p, lr=0.01)  # noqa: E731
        other = replicate(Normed(), dense)
        other.load(tmp_path, optimizer=False)
        dist.barrier()
        return dict(other.model.module.named_buffers())

    for buffers in session.run_all(load):
        torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=0, atol=0)

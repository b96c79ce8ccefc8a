"""All but `shard` works where TorchRec and FBGEMM are not installed; and `shard` says what to install."""

from __future__ import annotations

import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from conftest import Sessions

import nbdist.recsys
from nbdist import Session

ROOMS = [module.name for module in pkgutil.iter_modules(nbdist.recsys.__path__)]


def hide() -> None:
    """In a rank: from now on neither of the two can be imported, and recsys is imported again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torchrec", "fbgemm_gpu") or name.startswith("nbdist.recsys"):
            del sys.modules[name]
    for name in ("torchrec", "fbgemm_gpu"):
        sys.modules[name] = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def bare(sessions: Sessions) -> Session:
    """The file's session, without the two."""
    sessions[2].run_all(hide)
    return sessions[2]


def rows() -> dict[str, Any]:
    """A movie is liked where the user and it are both even or both odd."""
    from nbdist.recsys.loader import Ragged

    draw = torch.Generator().manual_seed(0)
    user, movie = torch.randint(20, (400,), generator=draw), torch.randint(10, (400,), generator=draw)
    genres = Ragged(torch.stack([movie, movie % 3], dim=1).flatten(), torch.arange(401) * 2)
    return {"user": user, "movie": movie, "genres": genres, "age": torch.rand(400), "liked": user % 2 == movie % 2}


def test_each_room_can_be_imported(bare: Session) -> None:
    def names() -> list[str]:
        import importlib

        return [importlib.import_module(f"nbdist.recsys.{name}").__name__ for name in ROOMS]

    assert len(bare.run(names)) == len(ROOMS) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DLRM", "DCNv2", "DeepFM"])
def test_click_models_train(bare: Session, name: str, tmp_path: Path) -> None:
    def train() -> Any:
        from nbdist.recsys import models
        from nbdist.recsys.loader import MemoryLoader
        from nbdist.recsys.metrics import AUC
        from nbdist.recsys.sharding import replicate
        from nbdist.recsys.training import evaluate, fit

        def predict(model: Any, batch: Any) -> Any:
            return model(batch), batch["liked"]

        def build() -> Any:
            kind = getattr(models, name)
            model = kind({"user": 20, "movie": 10, "genres": 10}, ["age"], embedding_dim=8, top_mlp=[16])
            return replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=0.03))

        torch.manual_seed(0)
        model = build()
        # `keyed=` is for TorchRec, and does no harm.
        train = MemoryLoader(rows(), 50, shuffle=True, seed=1, keyed=["user", "movie", "genres"])
        fit(model, predict, train, epochs=15, progress=False)
        model.save(tmp_path / "checkpoint")
        other = build()
        other.load(tmp_path / "checkpoint")
        auc = [evaluate(one, predict, MemoryLoader(rows(), 50), {"auc": AUC()})["auc"] for one in (model, other)]
        return auc, model.gather()

    auc, model = bare.run(train)
    assert auc[0] == auc[1] > 0.95
    with torch.no_grad():
        assert model(rows()).shape == (400,)


@pytest.mark.slow
def test_two_towers_train_and_find(bare: Session) -> None:
    def train() -> Any:
        from nbdist.recsys.loader import MemoryLoader
        from nbdist.recsys.models import TwoTower, draw_rows, softmax_logits
        from nbdist.recsys.sharding import replicate
        from nbdist.recsys.training import fit

        likes = {"user": torch.arange(100) % 20, "movie": torch.arange(100) % 10}
        items = {"movie": torch.arange(10)}

        def predict(model: Any, batch: Any) -> Any:
            drawn = draw_rows(items, 5)
            return softmax_logits(*model(batch, drawn), torch.cat([batch["movie"], drawn["movie"]]))

        torch.manual_seed(0)
        model = TwoTower({"user": 20}, {"movie": 10}, embedding_dim=8)
        parallel = replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        fit(
            parallel,
            predict,
            MemoryLoader(likes, 25),
            epochs=40,
            loss=torch.nn.functional.cross_entropy,
            progress=False,
        )
        return parallel.gather()

    from nbdist.recsys.retrieval import ItemIndex

    model = bare.run(train)
    movies = pl.DataFrame({"movie": range(10)})
    index = ItemIndex.of(model.item, movies, movies["movie"])
    with torch.no_grad():
        found = index.search(model.query({"user": torch.arange(20)}), 1)
    assert found["items"].explode().to_list() == [user % 10 for user in range(20)]


@pytest.mark.slow
def test_sasrec_trains(bare: Session) -> None:
    def train() -> Any:
        from nbdist.recsys.loader import MemoryLoader, Ragged
        from nbdist.recsys.models import SASRec, draw_rows
        from nbdist.recsys.sharding import replicate
        from nbdist.recsys.training import fit

        def predict(model: Any, batch: Any) -> Any:
            return model(batch, draw_rows({"movie": torch.arange(2, 12)}, 64)["movie"])

        torch.manual_seed(0)
        walks = 2 + (torch.arange(60)[:, None] % 10 + torch.arange(6)) % 10
        lists = {"history": Ragged(walks.flatten(), torch.arange(61) * 6)}
        model = replicate(
            SASRec(12, length=8, embedding_dim=16, blocks=1), lambda parameters: torch.optim.Adam(parameters, lr=0.01)
        )
        history = fit(
            model,
            predict,
            MemoryLoader(lists, 15),
            epochs=20,
            log_every=1,
            loss=torch.nn.functional.cross_entropy,
            progress=False,
        )
        return history[0].loss, history[-1].loss

    first, last = bare.run(train)
    assert last < 0.7 * first


def test_shard_says_what_to_install(bare: Session) -> None:
    def ask() -> tuple[str, bool]:
        from nbdist.recsys.models import TwoTower
        from nbdist.recsys.sharding import OPTIMIZERS, STRATEGIES, shard

        model = TwoTower({"user": 20}, {"movie": 10}, embedding_dim=8)
        before = list(model.modules())
        try:
            shard(model, {"user": STRATEGIES[0]}, batch_size=8, optimizer=next(iter(OPTIMIZERS)))
        except ImportError as error:
            return str(error), list(model.modules()) == before
        return "", False

    message, same = bare.run(ask)
    line = (
        r'\n    pip install "nbdist\[torchrec\]" && pip install --no-deps torchrec==[\d.]+ fbgemm-gpu(-cpu)?==[\d.]+$'
    )
    assert re.search(rf"^TorchRec is not installed\. For torch 2\.\d+\.\d+, .*{line}", message, re.S), message
    assert same, "the model is as it was"

"""Tables that grow in a checkpoint: old rows train on as they did, new ones begin as what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from nbdist import Session
from nbdist.recsys.etl import Categorify, Workflow
from nbdist.recsys.loader import keyed_jagged
from nbdist.recsys.sharding import replicate, shard

pytestmark = pytest.mark.slow

WARM = "import torchrec.distributed"
OLD, NEW = 50, 67
MORE = pytest.mark.long("more strategies")
STRATEGIES = ("row_wise", "table_wise", "column_wise", "grid_shard", "data_parallel")


class Model(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(rows)
        config = EmbeddingBagConfig(name="users", num_embeddings=rows, embedding_dim=8, feature_names=["user"])
        self.tables = EmbeddingBagCollection(tables=[config])
        self.over = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.tables(keyed_jagged({"user": ids}, ["user"])).values()).squeeze(1)


def build(how: str, optimizer: str, rows: int, dense: Any = torch.optim.Adam) -> Any:
    if how == "replicate":
        return replicate(Model(rows), dense)
    return shard(Model(rows), {"users": how}, batch_size=8, optimizer=optimizer, lr=0.1, dense_optimizer=dense)


def train(model: Any, steps: range, rows: int = OLD) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(rows, (8,), generator=torch.Generator().manual_seed(step))
        loss = (model.model(ids) - torch.sin(ids.float())).square().mean()
        model.optimizer.zero_grad()
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def yesterday(how: str, optimizer: str, folder: Path) -> tuple[nn.Module, list[float]]:
    model = build(how, optimizer, OLD)
    train(model, range(4))
    model.save(folder)
    return model.gather(), train(model, range(4, 8))


def today(how: str, optimizer: str, folder: Path, parts: torch.Tensor, **options: Any) -> Any:
    model = build(how, optimizer, NEW, **options)
    model.load(folder, grow={"users": parts})
    return model.gather(), train(model, range(4, 8)), train(model, range(20, 24), NEW)


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [
        *((how, "rowwise_adagrad") for how in STRATEGIES),
        *(pytest.param(how, "adagrad", marks=() if how in ("row_wise", "column_wise") else MORE) for how in STRATEGIES),
        *(("row_wise", "adam"), ("column_wise", "adam"), ("replicate", "")),
    ],
)
def test_old_rows_train_on_and_new_ones_begin_as_unknown(
    session: Session, tmp_path: Path, how: str, optimizer: str
) -> None:
    parts = torch.rand(OLD - 2)  # the table had two rows more than there were codes
    parts /= parts.sum()
    old, losses = session.run(yesterday, how, optimizer, tmp_path)
    new, after, with_new = session.run(today, how, optimizer, tmp_path, parts)
    assert after == pytest.approx(losses, abs=1e-6), "as if the tables had not grown, optimizer and all"
    assert len(with_new) == 4
    before, grown = (model.tables.embedding_bags["users"].weight for model in (old, new))
    assert grown.shape == (NEW, 8)
    torch.testing.assert_close(grown[: len(parts)], before[: len(parts)], rtol=0, atol=0)
    torch.testing.assert_close(grown[len(parts) :], (parts @ before[: len(parts)]).expand(NEW - len(parts), 8))
    torch.testing.assert_close(new.over.state_dict(), old.over.state_dict(), rtol=0, atol=0)


def test_grown_with_other_strategies(session: Session, tmp_path: Path) -> None:
    old, losses = session.run(yesterday, "table_wise", "adagrad", tmp_path)
    for how in ("row_wise", "column_wise", "grid_shard"):
        new, after, _ = session.run(today, how, "adagrad", tmp_path, torch.full((OLD,), 1 / OLD))
        assert after == pytest.approx(losses, abs=1e-5)
        expected = old.tables.embedding_bags["users"].weight.mean(0)
        torch.testing.assert_close(new.tables.embedding_bags["users"].weight[OLD:], expected.expand(NEW - OLD, 8))


def test_tables_that_cannot_grow_are_refused(session: Session, tmp_path: Path) -> None:
    session.run(yesterday, "row_wise", "adagrad", tmp_path)

    def load(rows: int, grow: Any) -> None:
        build("row_wise", "adagrad", rows).load(tmp_path, grow=grow)

    for rows, grow, message in (
        (NEW, None, rf"has the shape \({NEW}, 8\) here, .* has one of shape \({OLD}, 8\). .* loaded with grow="),
        (
            NEW,
            {"movies": torch.ones(3)},
            r"grow: 'movies' is none of over.bias, over.weight, tables.embedding_bags.users",
        ),
        (NEW, {"users": torch.ones(NEW)}, rf"'users' must have a weight for each of its {OLD} rows in .*, got {NEW}"),
        (OLD - 9, {"users": torch.ones(3)}, r"a table cannot lose rows"),
    ):
        with pytest.raises(ValueError, match=message):
            session.run(load, rows, grow)

    class Odd(torch.optim.Adagrad):
        """Keeps something with an unknown beginning."""

        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["z"] = parameter.detach().clone()
            return super().step(closure)

    def odd(rows: int) -> None:
        model = build("replicate", "", rows, dense=Odd)
        if rows == OLD:
            train(model, range(1))
            model.save(tmp_path / "odd")
        else:
            model.load(tmp_path / "odd", grow={"users": torch.ones(OLD) / OLD})

    session.run(odd, OLD)
    with pytest.raises(
        ValueError, match=r"cannot grow: no initial value of 'z' is known for new rows of .*users.weight"
    ):
        session.run(odd, NEW)


def test_the_next_day_in_one_piece(session: Session, tmp_path: Path) -> None:
    """Fit, train, save; the next day fit on, load, train on: by raw ids, the old users are who they were."""
    step = Categorify("user")
    first = pl.DataFrame({"user": ["ann", "bob", "bob"]})
    old = Workflow(step).fit(first, progress=False)
    new = Workflow(step).fit(pl.DataFrame({"user": ["zoe", "bob", "zoe", "abe"]}), previous=old, progress=False)

    def day(workflow: Workflow, before: Workflow | None) -> Any:
        model = build("row_wise", "adagrad", workflow.vocabularies["user"].size)
        if before is None:
            train(model, range(3), workflow.vocabularies["user"].size)
            model.save(tmp_path / "day")
        else:
            model.load(tmp_path / "day", grow={"users": before.vocabularies["user"].unknown_weights()})
        return model.gather()

    def vectors(workflow: Workflow, model: Any) -> dict[str, torch.Tensor]:
        weight = model.tables.embedding_bags["users"].weight
        return {user: weight[code] for user, code in workflow.vocabularies["user"].mapping().items()}

    was, now = vectors(old, session.run(day, old, None)), vectors(new, session.run(day, new, old))
    assert list(now) == ["bob", "ann", "zoe", "abe"]
    torch.testing.assert_close({user: now[user] for user in was}, was, rtol=0, atol=0)
    torch.testing.assert_close(now["zoe"], (2 * was["bob"] + was["ann"]) / 3)
    torch.testing.assert_close(now["abe"], now["zoe"])


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [
        ("replicate", ""),
        ("row_wise", "rowwise_adagrad"),
        ("column_wise", "adagrad"),
        pytest.param("grid_shard", "adagrad", marks=MORE),
    ],
)
@pytest.mark.parametrize("rows", [OLD, NEW])
def test_rows_that_go_to_another_value_begin_as_new_ones(
    session: Session, tmp_path: Path, how: str, optimizer: str, rows: int
) -> None:
    """With their optimizer's state: a row that was trained learns as one that never was."""

    def step(model: Any, one: int) -> None:
        loss = (model.model(torch.full((8,), one)) - 1).square().mean()
        model.optimizer.zero_grad()
        loss.backward()
        model.optimizer.step()

    def begin() -> nn.Module:
        model = build(how, optimizer, OLD)
        for _ in range(3):
            step(model, 3)
        model.save(tmp_path)
        return model.gather()

    def go_on(trained: int) -> list[nn.Module]:
        model = build(how, optimizer, rows)
        model.load(tmp_path, grow={"users": torch.ones(OLD) / OLD}, renew={"users": torch.tensor([3, 40])})
        before = model.gather()
        step(model, trained)
        return [before, model.gather()]

    old = session.run(begin).tables.embedding_bags["users"].weight
    expected, ends = old.clone(), []
    expected[[3, 40]] = old.mean(0)
    for one in (3, 40):
        before, after = (model.tables.embedding_bags["users"].weight for model in session.run(go_on, one))
        torch.testing.assert_close(before[:OLD], expected)
        assert not torch.equal(after[one], before[one])
        ends.append(after[one])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_rows_to_renew_are_those_of_a_table_that_grows(session: Session, tmp_path: Path) -> None:
    session.run(yesterday, "row_wise", "adagrad", tmp_path)

    def load(grow: Any, renew: Any) -> None:
        build("row_wise", "adagrad", NEW).load(tmp_path, grow=grow, renew=renew)

    with pytest.raises(ValueError, match="renew: 'users' must be in `grow`, too"):
        session.run(load, {}, {"users": torch.tensor([1])})
    with pytest.raises(ValueError, match=f"renew: rows of 'users' must be below {OLD}, got {OLD}"):
        session.run(load, {"users": torch.ones(OLD) / OLD}, {"users": torch.tensor([OLD])})

"""Collections of tables: what they look up, how they begin, and that TorchRec's have the same weights and answers."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from nbdist import Session
from nbdist.recsys.etl import Categorify, Workflow, fill_unknown
from nbdist.recsys.loader import Ragged, keyed_jagged
from nbdist.recsys.loader.foreign_ids import foreign_ids
from nbdist.recsys.models import PooledTables, SequenceTables
from nbdist.recsys.raw_ids import RawIds
from nbdist.recsys.sharding import shard

WARM = "import torchrec.distributed"
SIZES = {"user": 30, "genres": 8}


def batch(dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    genres = Ragged(torch.tensor([2, 3, 4, 4, 7], dtype=dtype), torch.tensor([0, 3, 3, 4, 5]))
    return {"user": torch.tensor([2, 7, 7, 29], dtype=dtype), "genres": genres, "age": torch.rand(4)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_pooled_as_a_naive_reference_has_it(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tables = PooledTables(SIZES, embedding_dim=4, mode=mode)
    weight: Any = {name: table.weight for name, table in tables.embedding_bags.items()}
    lists = [weight["genres"][ids] for ids in ([2, 3, 4], [], [4], [7])]
    pooled = [getattr(one, mode)(0) if len(one) else torch.zeros(4) for one in lists]
    expected = torch.cat([weight["user"][[2, 7, 7, 29]], torch.stack(pooled)], dim=1)
    torch.testing.assert_close(tables(batch(dtype)), expected)


def test_sequences() -> None:
    tables = SequenceTables(SIZES, embedding_dim=4)
    weight: Any = {name: table.weight for name, table in tables.embeddings.items()}
    found = tables(batch())
    assert torch.equal(found["genres"], weight["genres"][[2, 3, 4, 4, 7]])
    assert torch.equal(found["user"], weight["user"][[2, 7, 7, 29]])


def test_the_same_weights_gradients_and_names_as_torchrecs() -> None:
    torch.manual_seed(0)
    tables = PooledTables(SIZES, embedding_dim=4, mode="sum")
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=4, feature_names=[name])
        for name, size in SIZES.items()
    ]
    theirs = EmbeddingBagCollection(tables=configs)
    torch.testing.assert_close(dict(tables.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    found, expected = tables(batch()), theirs(keyed_jagged(batch(), list(SIZES))).values()
    assert torch.equal(found, expected)
    for values in (found, expected):
        values.square().sum().backward()
    for own, their in zip(tables.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, their.grad)


def test_batches_that_cannot_be_looked_up_are_refused() -> None:
    tables = PooledTables(SIZES, embedding_dim=4)
    with pytest.raises(ValueError, match="no column 'genres'; its columns are user"):
        tables({"user": torch.tensor([1])})
    with pytest.raises(ValueError, match=r"'user' has shape \(1, 2\): a list or one id per row"):
        tables({"user": torch.tensor([[1, 2]])})
    with pytest.raises(IndexError):
        tables({**batch(), "user": torch.tensor([1, 2, 3, 30])})
    with pytest.raises(
        ValueError, match=r"'user' must have integers, which are the rows of a table, got torch.float32"
    ):
        tables({**batch(), "user": torch.rand(4)})
    with pytest.raises(ValueError, match="`mode` must be 'mean' or 'sum', got 'max'"):
        PooledTables(SIZES, mode="max")
    with pytest.raises(ValueError, match="no table can have the name 'keys'"):
        SequenceTables({"keys": 3})
    with pytest.raises(ValueError, match=r"`cardinalities\['user'\]` must be at least 1, got 0"):
        PooledTables({"user": 0})
    with pytest.raises(ValueError, match="`embedding_dim` must be at least 1, got 0"):
        SequenceTables(SIZES, embedding_dim=0)
    with pytest.raises(TypeError, match="`cardinalities` must be"):
        PooledTables(["user"])  # type: ignore[arg-type]


def test_ids_without_a_row_are_named() -> None:
    model = nn.Sequential(PooledTables(SIZES, embedding_dim=4))
    assert foreign_ids(model, batch()) is None
    found = foreign_ids(model, {**batch(), "user": torch.tensor([1, 2, 3, 30])})
    assert found == "column 'user' must have ids 0 to 29, since the table has 30 rows, got 30 in row 3"
    lists = Ragged(torch.tensor([2, 3, -1, 4, 7]), torch.tensor([0, 2, 2, 4, 5]))
    found = foreign_ids(SequenceTables({"genres": 8}, embedding_dim=4), {"genres": lists})
    assert found is not None and found.endswith("got -1 in row 2")
    raw = PooledTables({"user": RawIds(capacity=5)}, embedding_dim=4)
    assert foreign_ids(raw, {"user": torch.tensor([1, 10**9])}) is None


def test_unknown_codes_are_filled() -> None:
    """By `nbdist.recsys.etl`, which knows collections by what they are called."""
    workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob", "bob"]}), progress=False)
    for tables in (PooledTables({"user": 4}, embedding_dim=2), SequenceTables({"user": 4}, embedding_dim=2)):
        (weight,) = tables.parameters()
        assert fill_unknown(tables, workflow) == {"user": [0, 1]}
        torch.testing.assert_close(weight[0], (2 * weight[2] + weight[3]) / 3)


class Both(nn.Module):
    """A model with collections of both kinds."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = PooledTables(SIZES, embedding_dim=8, device=device)
        self.lists = SequenceTables({"history": 16}, embedding_dim=8, device=device)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.bags(batch).sum() + (self.lists(batch)["history"] ** 2).sum()


@pytest.mark.slow
def test_sharded_and_back(session: Session) -> None:
    def step(device: str) -> Any:
        torch.manual_seed(0)
        model = Both(device)
        plain = Both() if device == "meta" else model
        # Both ranks have the same rows, so the mean of their gradients is the gradient of one rank.
        history = Ragged(torch.tensor([1, 2, 3, 15]), torch.tensor([0, 3, 3, 4, 4]))
        rows = {**batch(), "history": history}
        before = plain(rows)
        strategies = {"user": "row_wise", "genres": "column_wise", "history": "row_wise"}
        sharded = shard(model, strategies, batch_size=4, optimizer="sgd", lr=0.1)
        begun = sharded.gather()
        after = sharded.model(rows)
        after.backward()
        sharded.optimizer.step()
        return before.item(), after.item(), begun, sharded.gather(), rows

    before, after, begun, trained, rows = session.run(step, "cpu")
    assert after == pytest.approx(before, rel=1e-5)
    assert type(trained) is Both and type(trained.bags) is PooledTables and type(trained.lists) is SequenceTables
    begun(rows).backward()
    with torch.no_grad():
        for parameter in begun.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(dict(trained.state_dict()), dict(begun.state_dict()))
    _, after, begun, _, rows = session.run(step, "meta")
    assert begun(rows).item() == pytest.approx(after, rel=1e-5), "tables that were never whole"


@pytest.mark.slow
def test_a_model_that_does_not_fit_can_be_sharded_otherwise(session: Session) -> None:
    def ask() -> Any:
        model = Both()
        try:
            shard(model, batch_size=4, memory_bytes=100)
        except ValueError as error:
            return str(error), type(model.bags).__name__, type(shard(model, batch_size=4)._template.bags).__name__
        return None

    message, *kinds = session.run(ask)
    assert "the tables do not fit on 2 ranks" in message and kinds == ["PooledTables", "PooledTables"]

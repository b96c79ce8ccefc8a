"""Ids outside a sharded table are an error that names them, and neither read nor train another row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from nbdist import Session
from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.sharding import STRATEGIES, shard
from nbdist.recsys.versions import has_grid_shard, lacks_sequences

pytestmark = pytest.mark.slow

WARM = "import torchrec.distributed"
ROWS = 50
#: On CPUs, the FBGEMM of torch 2.5 and 2.6 has sequences in copies only.
OF_A_SEQUENCE = "data_parallel" if lacks_sequences() else "row_wise"
MORE = pytest.mark.long("more strategies")


def ask(strategy: str, ids: list[int], pooled: bool = True, **options: Any) -> torch.Tensor:
    """In a rank: a table looked up by two features; the second has no ids on rank 1."""
    shape: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": 32, "feature_names": ["user", "friend"]}
    model: nn.Module
    if pooled:
        model = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="users", **shape)])
    else:
        model = EmbeddingCollection(tables=[EmbeddingConfig(name="users", **shape)])
    sharded = shard(model, {"*": strategy}, batch_size=8, **options)
    mine = ids if dist.get_rank() == 0 else []
    batch = KeyedJaggedTensor(
        keys=["user", "friend"],
        values=torch.tensor([0, ROWS - 1, *mine]),
        lengths=torch.tensor([1, 1, len(mine), 0]),
    )
    output = sharded.model(batch)
    values = output.values() if pooled else output["user"].values()
    values.sum().backward()
    return values.detach()


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        pytest.param(strategy, wrong, marks=MORE if "table_" in strategy and wrong in (ROWS, 10**6) else ())
        for strategy in STRATEGIES
        if strategy != "grid_shard" or has_grid_shard()
        for wrong in (ROWS, 57, 10**6, -1)
    ],
)
def test_an_id_outside_a_table(session: Session, strategy: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"feature 'friend' has the id {wrong}, and table 'users' has 50 rows: .*49"):
        session.run(ask, strategy, [3, wrong])


def test_an_id_outside_the_table_of_a_sequence(session: Session) -> None:
    with pytest.raises(ValueError, match="feature 'friend' has the id 57, and table 'users'"):
        session.run(ask, OF_A_SEQUENCE, [57], pooled=False)


@pytest.mark.parametrize("pooled", [True, False])
def test_the_first_and_the_last_row_are_inside(session: Session, pooled: bool) -> None:
    assert len(session.run(ask, "row_wise" if pooled else OF_A_SEQUENCE, [0, ROWS - 1], pooled)) == 2


def test_ids_are_not_checked_with_checked_false(session: Session) -> None:
    assert len(session.run(ask, "table_wise", [57], checked=False)) == 2


def test_an_id_that_the_loader_has_seen(session: Session) -> None:
    """Nothing is read of the ids in the step; and the error is the same."""

    def look_up(ids: list[int], change: int | None) -> bool:
        config = EmbeddingBagConfig(name="users", num_embeddings=ROWS, embedding_dim=32, feature_names=["user"])
        sharded = shard(EmbeddingBagCollection(tables=[config]), {"*": "row_wise"}, batch_size=8)
        user = torch.tensor(ids if dist.get_rank() == 0 else [0] * len(ids))
        for batch in MemoryLoader({"user": user}, 2, keyed="user", rank=0, world_size=1):
            features = keyed_jagged(batch, ["user"])
            if change is not None:
                features.values()[0] = change
            with torch.profiler.profile() as profiler:
                sharded.model(features).values()
        return any("aminmax" in event.key for event in profiler.key_averages())

    assert session.run(look_up, [1, ROWS - 1, 0, 5], None) is False
    for ids, change in (([1, 2, 3, 57], None), ([1, 2, 3, 4], 57)):
        with pytest.raises(ValueError, match=r"feature 'user' has the id 57, and table 'users' has 50 rows"):
            session.run(look_up, ids, change)

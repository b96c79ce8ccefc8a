"""What sharded training asks of a GPU, as far as CPU ranks show it: a reserve, tables by blocks, no waiting."""

from __future__ import annotations

import re
import types
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from nbdist import Session
from nbdist.recsys.sharding import shard
from nbdist.recsys.sharding import sharded as sharded_module
from nbdist.recsys.sharding.hooks import move_inputs
from nbdist.recsys.sharding.initial import fill
from nbdist.recsys.sharding.strategies import Table

pytestmark = pytest.mark.slow


def bags(rows: int, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="users", num_embeddings=rows, embedding_dim=16, feature_names=["user"], pooling=pooling
    )
    return EmbeddingBagCollection(tables=[config])


def plan_with(free: int | None) -> None:
    if free is None:
        shard(bags(50_000), {"users": "table_wise"}, batch_size=8, memory_bytes=1000)
    whole = psutil.virtual_memory()._replace(available=2 * (free or 0))  # two ranks share it
    psutil.virtual_memory = lambda: whole  # type: ignore[assignment]
    shard(bags(50_000), {"users": "table_wise"}, batch_size=8)


def gather_by_blocks() -> Any:
    received = []
    receive = dist.recv

    def recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(tensor.nbytes)
        return receive(tensor, *args, **kwargs)

    sharded_module.BLOCK, dist.recv = 64 << 10, recv
    torch.manual_seed(1)
    model = bags(5_000)
    weights = model.embedding_bags["users"].weight.detach().clone()
    whole = shard(model, {"users": "row_wise"}, batch_size=8).gather()
    if whole is None:
        return None
    return received, bool(torch.equal(whole.embedding_bags["users"].weight, weights))


def test_a_sharded_model_takes_inputs_from_the_cpu() -> None:
    class Look(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    module = Look()
    move_inputs(module, torch.device("meta"))
    ids = KeyedJaggedTensor.from_lengths_sync(["user"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    (first, pair, number), kwargs = module(torch.ones(2), (torch.ones(1), ids), 3, batch={"user": torch.ones(1)})
    assert number == 3 and isinstance(pair, tuple) and isinstance(pair[1], KeyedJaggedTensor)
    assert {one.device.type for one in (first, pair[0], pair[1].values(), kwargs["batch"]["user"])} == {"meta"}
    there = ids.to(torch.device("meta"))
    assert module(there)[0][0] is there, "what a loader has looked at stays the same object"


def test_a_table_is_drawn_where_its_shards_are() -> None:
    drawn: list[tuple[torch.device, int]] = []
    config = EmbeddingBagConfig(name="users", num_embeddings=1 << 19, embedding_dim=16, feature_names=["user"])
    config.init_fn = lambda block: drawn.append((block.device, block.numel()))
    table = Table("users", "users.weight", config, torch.nn.Parameter(torch.empty(1 << 19, 16, device="meta")), True)

    def shard_on(device: str) -> Any:
        part = types.SimpleNamespace(shard_offsets=[0, 0])
        held = types.SimpleNamespace(tensor=torch.empty(1 << 19, 16, device=device), metadata=part)
        return types.SimpleNamespace(local_shards=lambda: [held])

    fill({"users.weight": shard_on("meta")}, {"users": table}, 1)  # as on a GPU: some MB at a time, copied from nowhere
    assert drawn == [(torch.device("meta"), 1 << 22)] * 2
    drawn.clear()
    fill({"users.weight": shard_on("cpu")}, {"users": table}, 1)
    assert drawn == [(torch.device("cpu"), 1 << 17)] * 64


class Waits(TorchDispatchMode):
    """The operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = "repeat_interleave" in str(func) and (kwargs or {}).get("output_size") is None
        if counts or "_local_scalar_dense" in str(func) or "lift_fresh" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def waits_of_means() -> list[str]:
    """Of the hook that divides by the sizes of bags, in a second step."""
    from torchrec import KeyedTensor

    from nbdist.recsys.sharding.hooks import divide_means

    class Pooled(torch.nn.Module):
        def forward(self, features: Any) -> Any:
            class Awaitable:
                def wait(self) -> Any:
                    return KeyedTensor(["user"], [16], torch.ones(2, 16))

            return Awaitable()

    module = Pooled()
    divide_means(module, {"users": True}, {"users": ["user"]})
    features = KeyedJaggedTensor(["user"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    assert module(features).values()[:, 0].tolist() == [0.5, 1.0]
    with Waits() as waits:
        module(features)
    return waits.found


def test_what_a_gpu_is_asked_for() -> None:
    with Session(2, devices="cpu") as session:
        with pytest.raises(ValueError, match="do not fit") as caught:
            session.run(plan_with, None)
        found = re.search(r"([\d,]+) bytes on one rank", str(caught.value))
        assert found is not None
        needed = int(found[1].replace(",", ""))
        with pytest.raises(ValueError, match=r"bytes each \([\d,]+ are free; the rest is for dense layers"):
            session.run(plan_with, int(needed / 0.95))  # enough for the table, and for nothing beside it
        session.run(plan_with, int(needed / 0.8))
        received, same = session.run(gather_by_blocks)
        assert same and received and max(received) <= 64 << 10
        assert session.run(waits_of_means) == []

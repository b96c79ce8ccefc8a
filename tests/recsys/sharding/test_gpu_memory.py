"""Sharded training on a GPU, as far as CPU ranks show it: a reserve, tables by blocks, no waiting."""

from __future__ import annotations

import dataclasses
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
from nbdist.recsys.sharding import planning, shard
from nbdist.recsys.sharding import sharded as sharded_module
from nbdist.recsys.sharding.bandwidth import Bandwidth
from nbdist.recsys.sharding.collections import find_tables
from nbdist.recsys.sharding.hooks import move_inputs
from nbdist.recsys.sharding.initial import fill
from nbdist.recsys.sharding.planning import Planner, make_sharders
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


def planner(memory: int | None) -> Planner:
    """Plan one table of 3.2 MB for a GPU, with nothing but its memory asked for."""
    model = bags(50_000)
    tables = find_tables(model)
    return Planner(model, tables, {}, make_sharders({}), {"users": "adagrad"}, 8, memory, torch.device("cuda"), None)


def test_tables_that_no_gpu_can_hold_are_refused() -> None:
    """Left to itself TorchRec would take memory of the host."""
    one = planner(None)
    constraints = {"users": one._constrain(one.tables["users"], 1, 1)}
    constraints["users"].sharding_types = ["table_wise"]
    with pytest.raises(ValueError, match="the tables do not fit on 1 ranks with 1,000,000 bytes each, alas"):
        one._plan_here(constraints, on_one_gpu(1_000_000), 1_000_000, ", alas")
    torchrec_plan, _ = one._plan_here(constraints, on_one_gpu(10_000_000), 10_000_000, "")
    assert next(iter(torchrec_plan.plan[""].values())).compute_kernel == "fused"


def on_one_gpu(memory: int) -> Any:
    return planning._topology("cuda", 1, 1, Bandwidth(1e9, 1e9), memory)


def test_a_table_is_in_the_hosts_memory_if_that_is_asked_for() -> None:
    one = planner(None)
    tables, gpu = one.tables, torch.device("cuda")
    for kernel in ("fused_uvm", "fused_uvm_caching"):
        chosen = planning.choose_kernels({"u*": kernel}, tables, gpu, None)
        assert chosen == {"users": kernel}
        asked = dataclasses.replace(one, kernels=chosen)
        constraints = {"users": asked._constrain(tables["users"], 1, 1)}
        torchrec_plan, plan = asked._plan_here(constraints, on_one_gpu(2_000_000), 2_000_000, "")
        assert next(iter(torchrec_plan.plan[""].values())).compute_kernel == kernel
        assert plan.shards[0].bytes == 3_200_000, "more than the GPU has"
    with pytest.raises(ValueError, match=r"`compute_kernels\['users'\]` must be one of fused, .* got 'dense'"):
        planning.choose_kernels({"users": "dense"}, tables, gpu, None)
    with pytest.raises(ValueError, match="`compute_kernels` must be None with fused=False"):
        planning.choose_kernels({"users": "fused"}, tables, gpu, False)


def test_the_rank_with_the_least_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 share a GPU; rank 2 has the least, but for what its allocator holds back."""
    free, reserved, uuids = [9_000, 9_000, 1_000], [0, 0, 3_500], ["a", "a", "b"]
    here = [0]

    def of(values: list[Any]) -> Any:
        return lambda device: values[here[0]]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[here[0]], 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", of(reserved))
    monkeypatch.setattr(torch.cuda, "memory_allocated", of([0, 0, 500]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", of([types.SimpleNamespace(uuid=one) for one in uuids]))
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: here[0])
    told: list[Any] = []
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: told.append(mine))
    for here[0] in range(3):
        with pytest.raises(TypeError):  # the replaced collective returns nothing
            planning._least_free(torch.device("cuda", 0), 3)
    assert told == [(9_000, "a"), (9_000, "a"), (4_000, "b")]
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: into.__setitem__(slice(None), told))
    assert planning._least_free(torch.device("cuda", 0), 3) == (4_000, 2)
    free[2] = 3_000
    told[2] = (6_000, "b")
    assert planning._least_free(torch.device("cuda", 0), 3) == (4_500, 0)


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
    """Return the waits of the hook that divides by the sizes of bags, in a second step."""
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


def test_the_planner_uses_the_free_memory_of_the_gpu() -> None:
    with Session(2, devices="cpu") as session:
        with pytest.raises(ValueError, match="do not fit") as caught:
            session.run(plan_with, None)
        found = re.search(r"([\d,]+) bytes on one rank", str(caught.value))
        assert found is not None
        needed = int(found[1].replace(",", ""))
        with pytest.raises(ValueError, match=r"bytes each \([\d,]+ are free on rank 0; the rest is for dense layers"):
            session.run(plan_with, int(needed / 0.95))  # enough for the table, but not for other memory
        session.run(plan_with, int(needed / 0.8))
        received, same = session.run(gather_by_blocks)
        assert same and received and max(received) <= 64 << 10
        assert session.run(waits_of_means) == []

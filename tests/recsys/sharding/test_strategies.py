"""Sharded tables do what the same tables do in one piece, whatever the strategy and the number of ranks."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import mmap
import re
import runpy
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.profiler import record_function
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import PoolingType

from nbdist import Session
from nbdist.recsys.sharding import STRATEGIES as ALL_STRATEGIES
from nbdist.recsys.sharding import Plan, Sharded, bandwidth, equal_steps, planning, shard
from nbdist.recsys.sharding.bandwidth import Bandwidth, measure
from nbdist.recsys.sharding.plan import Shard as PlanShard
from nbdist.recsys.sharding.sharded import kernels
from nbdist.recsys.sharding.strategies import Table, refusal
from nbdist.recsys.versions import (
    check_gpu,
    check_torchrec,
    has_grid_shard,
    lacks_sequences,
    matching,
    pair_for_this_torch,
    releases,
)
from nbdist.shm.process_group import shared_group
from nbdist.system.huge_pages import gather

pytestmark = pytest.mark.slow

WARM = "import torchrec.distributed"
NUMBERS = (2, 4)
#: Those that the TorchRec of this torch has.
STRATEGIES = [one for one in ALL_STRATEGIES if one != "grid_shard" or has_grid_shard()]
FOUR, MORE = pytest.mark.long("more on four ranks"), pytest.mark.long("more strategies")
#: One strategy of each kind: by rows, by columns, by both, copied. The others are long.
SOME_STRATEGIES = [
    strategy
    if strategy in ("row_wise", "column_wise", "grid_shard", "data_parallel")
    else pytest.param(strategy, marks=MORE)
    for strategy in STRATEGIES
]
ROW_STRATEGIES = tuple(one for one in STRATEGIES if one in ("row_wise", "table_row_wise", "grid_shard"))
COLUMN_STRATEGIES = ("column_wise", "table_column_wise", "grid_shard")
SEQUENCE_STRATEGIES = ("table_wise", "row_wise", "column_wise", "data_parallel")
OTHERS = tuple(one for one in STRATEGIES if one not in SEQUENCE_STRATEGIES)


@dataclass(frozen=True)
class Case:
    """Tables, and how they are trained."""

    strategy: str = "row_wise"
    others: dict[str, str] = field(default_factory=dict)
    """Tables of another strategy."""
    rows: tuple[int, ...] = (50, 23)
    columns: int = 32
    mean: bool = False
    weighted: bool = False
    optimizer: str = "adagrad"
    fused: bool | None = None
    eps: float = 1e-8
    batches: tuple[int, ...] = (6, 6, 6, 6)
    """The number of samples of each rank; a case with fewer ranks uses the first of them."""
    longest: int = 4
    """The largest number of ids in a bag."""
    steps: int = 3
    seed: int = 0
    real: bool = True
    """True if the tables have values before they are sharded."""
    sequences: bool = False
    """True for the tables of an `EmbeddingCollection`, which does not pool."""

    def tables(self, device: str = "cpu") -> EmbeddingBagCollection | EmbeddingCollection:
        torch.manual_seed(self.seed)
        shapes: list[dict[str, Any]] = [
            {
                "name": f"table_{i}",
                "num_embeddings": rows,
                "embedding_dim": self.columns,
                # The first table is looked up by two features.
                "feature_names": [f"feature_{i}", "again"] if i == 0 else [f"feature_{i}"],
            }
            for i, rows in enumerate(self.rows)
        ]
        if self.sequences:
            some = [EmbeddingConfig(**shape) for shape in shapes]
            return EmbeddingCollection(tables=some, device=torch.device(device))
        pooling = PoolingType.MEAN if self.mean else PoolingType.SUM
        configs = [EmbeddingBagConfig(**shape, pooling=pooling) for shape in shapes]
        return EmbeddingBagCollection(tables=configs, is_weighted=self.weighted, device=torch.device(device))

    def batch(self, rank: int, step: int) -> KeyedJaggedTensor:
        draw = torch.Generator().manual_seed(self.seed * 10_000 + step * 10 + rank)
        keys = [*(f"feature_{i}" for i in range(len(self.rows))), "again"]
        lengths, values = [], []
        for rows in (*self.rows, self.rows[0]):
            lengths.append(torch.randint(self.longest + 1, (self.batches[rank],), generator=draw))
            values.append(torch.randint(rows, (int(lengths[-1].sum()),), generator=draw))
        ids = torch.cat(values)
        weights = torch.rand(len(ids), generator=draw) + 0.5 if self.weighted else None
        return KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.cat(lengths), weights=weights)

    def output(self, tables: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Shape (samples, columns of all features), or (ids of all features, columns)."""
        if not self.batches[rank] and isinstance(tables, (EmbeddingBagCollection, EmbeddingCollection)):
            # TorchRec's modules cannot look up nothing.
            return torch.zeros(0, self.columns * (1 if self.sequences else len(self.rows) + 1), requires_grad=True)
        output = tables(self.batch(rank, step))
        if not self.sequences:
            return output.values()  # type: ignore[no-any-return]
        parts = output if isinstance(output, dict) else output.wait()
        assert {len(part.lengths()) for part in parts.values()} == {self.batches[rank]}
        return torch.cat([parts[name].values() for name in sorted(parts)])

    def loss(self, output: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed * 10_000 + step * 10 + rank + 5)
        # A batch without samples has the loss 0.
        target = torch.randn(output.shape, generator=draw)
        return ((output - target) ** 2).sum() / max(1, self.batches[rank])


def train(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, nn.Module | None, Plan]:
    """In a rank: the outputs of each step, those for one more batch, the gathered tables, the plan."""
    rank = dist.get_rank()
    tables = case.tables("cpu" if case.real else "meta")
    options = {"optimizer": case.optimizer, "lr": 0.1, "eps": case.eps, "fused": case.fused}
    sharded = shard(tables, {"*": case.strategy} | case.others, batch_size=8, **options)
    outputs = []
    for step in range(case.steps):
        sharded.optimizer.zero_grad()
        output = case.output(sharded.model, rank, step)
        outputs.append(output.detach().clone())
        case.loss(output, rank, step).backward()
        sharded.optimizer.step()
    return outputs, case.output(sharded.model, rank, case.steps).detach(), sharded.gather(), sharded.plan


class RowsAdam(torch.optim.SparseAdam):
    """Adam of the rows that have a gradient."""

    def step(self, closure: Any = None) -> None:
        dense = [(p, p.grad) for group in self.param_groups for p in group["params"]]
        for p, gradient in dense:
            p.grad = gradient.to_sparse(1)
        super().step(closure)
        for p, gradient in dense:
            p.grad = gradient


class BlockwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad with a state per row and block of columns, written down independently of FBGEMM's."""

    def __init__(self, parameters: Any, lr: float, eps: float, parts: int) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps, "parts": parts})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                blocks = p.grad.view(len(p), group["parts"], -1)  # (rows, parts, columns of a part)
                total = self.state[p].setdefault("total", torch.zeros(len(p), group["parts"], 1))
                total += (blocks**2).mean(dim=2, keepdim=True)
                p -= group["lr"] * (blocks / (total.sqrt() + group["eps"])).view_as(p)


def unsharded(case: Case, nranks: int, parts: int = 1) -> tuple[list[list[torch.Tensor]], nn.Module]:
    """The same training in this process: the outputs of each rank and step, and the tables."""
    tables = case.tables()
    make: Any = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
        "rowwise_adagrad": lambda p: BlockwiseAdagrad(p, 0.1, 1e-8, parts),
        "adam": lambda p: RowsAdam(list(p), lr=0.1, eps=case.eps),
    }
    optimizer = make[case.optimizer](tables.parameters())
    outputs: list[list[torch.Tensor]] = [[] for _ in range(nranks)]
    for step in range(case.steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for rank in range(nranks):
            output = case.output(tables, rank, step)
            outputs[rank].append(output.detach().clone())
            total = total + case.loss(output, rank, step) / nranks
        total.backward()
        optimizer.step()
    return outputs, tables


def assert_same(session: Session, case: Case, parts: int = 1) -> list[Any]:
    expected, tables = unsharded(case, session.nranks, parts)
    answers = session.run_all(train, case)
    whole = answers[0][2]
    assert type(whole) is type(tables) and all(gathered is None for _, _, gathered, _ in answers[1:])
    torch.testing.assert_close(dict(whole.state_dict()), dict(tables.state_dict()), rtol=0, atol=1e-5)
    for rank, (outputs, last, _, _) in enumerate(answers):
        # Equal weights give equal outputs: those they all begin with, and the learned ones.
        torch.testing.assert_close(outputs[0], expected[rank][0], rtol=0, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(last, case.output(whole, rank, case.steps), rtol=0, atol=1e-6)
        # Between the two, what weights that differ by less than 1e-5 make of a bag.
        torch.testing.assert_close(outputs, expected[rank], rtol=0, atol=1e-5 * 1.5 * max(1, case.longest))
    return answers


@pytest.mark.parametrize("nranks", [2, pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_trains_as_one_process_does(sessions: Sessions, strategy: str, nranks: int) -> None:
    answers = assert_same(sessions[nranks], Case(strategy))
    plan = answers[0][3]
    assert plan == answers[-1][3] and plan.strategies == {"table_0": strategy, "table_1": strategy}
    for index, rows in enumerate((50, 23)):
        shards = [s for s in plan.shards if s.table == f"table_{index}"]
        area = sum(s.rows * s.columns for s in shards)
        assert area == rows * 32 * (nranks if strategy == "data_parallel" else 1), "the shards make up the table"
        assert sum(s.bytes for s in shards) == 4 * area
    assert (len({s.column for s in plan.shards}) > 1) == (strategy in COLUMN_STRATEGIES)
    assert (len({s.row for s in plan.shards}) > 1) == (strategy in ROW_STRATEGIES)


@pytest.mark.parametrize("strategy", SOME_STRATEGIES)
@pytest.mark.parametrize(("optimizer", "nranks"), [("sgd", 2), ("rowwise_adagrad", 4)])
def test_the_other_optimizers(sessions: Sessions, optimizer: str, strategy: str, nranks: int) -> None:
    parts = {"column_wise": nranks, "table_column_wise": nranks, "grid_shard": 2}.get(strategy, 1)
    assert_same(sessions[nranks], Case(strategy, optimizer=optimizer, weighted=True), parts)


WAITING = [
    *((strategy, "adam") for strategy in SEQUENCE_STRATEGIES),
    *(pytest.param(one, "adam", marks=MORE) for one in OTHERS),
    *(("row_wise", "sgd"), ("data_parallel", "adagrad"), ("table_wise", "adagrad")),
    *((one, "rowwise_adagrad") for one in OTHERS if one == "grid_shard"),
]


@pytest.mark.parametrize(("strategy", "optimizer"), WAITING)
def test_updates_that_wait_for_the_step(sessions: Sessions, strategy: str, optimizer: str) -> None:
    if optimizer == "adam" and strategy == "data_parallel":
        with pytest.raises(ValueError, match="copies of a table train with sgd, adagrad, rowwise_adagrad only"):
            sessions[2].run(train, Case(strategy, optimizer=optimizer))
        return
    parts = {"column_wise": 2, "table_column_wise": 2, "grid_shard": 2}.get(strategy, 1)
    case = Case(strategy, optimizer=optimizer, fused=False)
    if optimizer == "adam":  # SparseAdam adds epsilon at another place: see the next test
        case = dataclasses.replace(case, fused=None, eps=1e-12)
    assert_same(sessions[2], dataclasses.replace(case, mean=True), parts)
    assert_same(sessions[2], dataclasses.replace(case, weighted=True, batches=(5, 0, 0, 0)), parts)
    if strategy in SEQUENCE_STRATEGIES and not (lacks_sequences() and strategy != "data_parallel"):
        assert_same(sessions[2], dataclasses.replace(case, sequences=True, longest=2), parts)


def test_adam_is_that_of_torch(sessions: Sessions) -> None:
    """All rows in each step, and an epsilon so large that its place in the formula matters."""
    ids = torch.arange(12)

    def tables() -> EmbeddingBagCollection:
        torch.manual_seed(0)
        config = EmbeddingBagConfig(name="table", num_embeddings=12, embedding_dim=8, feature_names=["id"])
        return EmbeddingBagCollection(tables=[config])

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        features = KeyedJaggedTensor(["id"], ids, lengths=torch.ones_like(ids))
        for step in range(6):
            optimizer.zero_grad()
            (model(features).values() * torch.sin(step + torch.arange(96.0)).view(12, 8)).square().mean().backward()
            optimizer.step()

    def sharded() -> Any:
        model = shard(tables(), {"*": "row_wise"}, batch_size=12, optimizer="adam", lr=0.1, eps=0.01)
        steps(model.model, model.optimizer)
        return model.gather()

    plain = tables()
    steps(plain, torch.optim.Adam(plain.parameters(), lr=0.1, eps=0.01))
    found = sessions[2].run(sharded)
    torch.testing.assert_close(dict(found.state_dict()), dict(plain.state_dict()), rtol=0, atol=1e-6)


def test_an_optimizer_for_each_table(sessions: Sessions) -> None:
    """Tables of one collection, each as if it were trained by itself; a fused one among them."""

    def both(optimizer: Any, lr: Any, fused: bool | None) -> Any:
        case = Case(rows=(50, 23, 31))
        model = shard(case.tables(), {"*": "row_wise"}, batch_size=8, optimizer=optimizer, lr=lr, fused=fused)
        for step in range(5):
            model.optimizer.zero_grad()
            case.loss(case.output(model.model, dist.get_rank(), step), dist.get_rank(), step).backward()
            model.optimizer.step()
        rates = sorted({round(group["lr"], 6) for group in model.optimizer.param_groups})
        return model.gather(), model._fused, rates

    named = {"table_0": "adam", "table_1": "sgd", "*": "adagrad"}
    rates = {"table_0": 0.02, "table_[12]": 0.1}
    found, fused, groups = sessions[2].run(both, named, rates, None)
    assert fused and groups == [0.02, 0.1]
    for table, optimizer, rate in (("table_0", "adam", 0.02), ("table_1", "sgd", 0.1), ("table_2", "adagrad", 0.1)):
        # Of the sum of squares, each table's gradient is its own.
        alone, alone_fused, _ = sessions[2].run(both, optimizer, rate, False)
        assert not alone_fused
        own = [one.embedding_bags[table].weight for one in (found, alone)]
        torch.testing.assert_close(own[0], own[1], rtol=0, atol=1e-6)


FEW = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SHAPES: dict[str, Any] = {
    "rows": st.lists(st.integers(1, 70), min_size=1, max_size=4),
    "width": st.integers(1, 4),
    "optimizer": st.sampled_from(["sgd", "adagrad"]),
    "longest": st.integers(0, 5),
    "batches": st.tuples(*[st.integers(0, 9)] * 4),
    "seed": st.integers(0, 1000),
}
POOLINGS = st.sampled_from(["sum", "mean", "weighted"])  # torch itself has no weighted mean


def assert_same_shape(
    session: Session, strategy: str, nranks: int, rows: list[int], width: int, **options: Any
) -> None:
    # A part without rows is refused.
    assume(strategy not in ROW_STRATEGIES or all(-(-n // -(-n // nranks)) == nranks for n in rows))
    assert_same(session, Case(strategy, {}, tuple(rows), width * 4 * nranks, **options))


@pytest.mark.parametrize("strategy", SOME_STRATEGIES)
def test_any_shape(sessions: Sessions, strategy: str) -> None:
    @FEW
    @given(nranks=st.sampled_from(NUMBERS), pooling=POOLINGS, **SHAPES)
    def check(nranks: int, pooling: str, **options: Any) -> None:
        options |= {"mean": pooling == "mean", "weighted": pooling == "weighted"}
        assert_same_shape(sessions[nranks], strategy, nranks, **options)

    check()


@pytest.mark.parametrize("strategy", SEQUENCE_STRATEGIES)
def test_sequences_of_any_shape(sessions: Sessions, strategy: str) -> None:
    if lacks_sequences() and strategy != "data_parallel":
        with pytest.raises(ValueError, match=r"take torch 2\.8 or newer"):
            sessions[2].run(train, Case(strategy, sequences=True))
        return

    @FEW
    @given(nranks=st.sampled_from(NUMBERS), **SHAPES)
    def check(nranks: int, **options: Any) -> None:
        assert_same_shape(sessions[nranks], strategy, nranks, sequences=True, **options)

    check()


@pytest.mark.parametrize("strategy", SOME_STRATEGIES)
def test_batches_of_different_sizes(sessions: Sessions, strategy: str) -> None:
    assert_same(sessions[2], Case(strategy, batches=(7, 3, 0, 0), mean=True))
    assert_same(sessions[2], Case(strategy, batches=(0, 8, 0, 0), weighted=True))
    assert_same(sessions[4], Case(strategy, batches=(5, 0, 0, 2), mean=True))
    assert_same(sessions[2], Case(strategy, batches=(0, 0, 0, 0), steps=2))


class Clicks(nn.Module):
    """A model with tables and dense layers: a tower on pooled tables, and a sequence of embeddings."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=16, feature_names=[name])
                for name in ("user", "movie")
            ],
            device=torch.device(device),
        )
        self.history = EmbeddingCollection(
            tables=[EmbeddingConfig(name="seen", num_embeddings=30, embedding_dim=16, feature_names=["seen"])],
            device=torch.device(device),
        )
        self.over = nn.Sequential(nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, bags: KeyedJaggedTensor, seen: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(bags).values()  # (batch, 32)
        last = self.history(seen)["seen"].to_padded_dense(2).sum(1)  # (batch, 16)
        return self.scale * self.over(torch.cat([pooled, last], dim=1)).squeeze(1)


def clicks(rank: int, step: int, size: int = 8) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    ones, twos = torch.ones(2 * size, dtype=torch.long), torch.full((size,), 2)
    bags = KeyedJaggedTensor(["user", "movie"], torch.randint(40, (2 * size,), generator=draw), lengths=ones)
    seen = KeyedJaggedTensor(["seen"], torch.randint(30, (2 * size,), generator=draw), lengths=twos)
    return bags, seen, torch.rand(size, generator=draw)


def build(strategies: dict[str, str], seed: int = 1) -> Sharded:
    torch.manual_seed(seed)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)

    return shard(Clicks(), strategies, batch_size=8, lr=0.1, dense_optimizer=adam)


def fit(sharded: Sharded, steps: range, sizes: tuple[int, ...] = (8, 8, 8, 8)) -> list[float]:
    losses = []
    for step in steps:
        bags, seen, target = clicks(dist.get_rank() % 2, step, sizes[dist.get_rank()])
        sharded.optimizer.zero_grad()
        loss = nn.functional.mse_loss(sharded.model(bags, seen), target)
        loss.backward()
        sharded.optimizer.step()
        losses.append(loss.item())
    return losses


SPLIT = {"user": "row_wise", "movie": "column_wise", "seen": "row_wise"}
PLANS = {
    "table_wise": {"*": "table_wise"},
    "row_wise": {"*": "row_wise"},
    "column_wise": {"*": "column_wise"},
    "table_row_wise": {"seen": "row_wise", "*": "table_row_wise"},
    "table_column_wise": {"seen": "column_wise", "*": "table_column_wise"},
    "grid_shard": {"seen": "table_wise", "*": "grid_shard"},
    "data_parallel": {"*": "data_parallel"},
}
PLANS = {name: PLANS[name] for name in STRATEGIES}
if lacks_sequences():  # on CPUs, the FBGEMM of torch 2.5 to 2.7 has sequences in copies only
    SPLIT = {**SPLIT, "seen": "data_parallel"}
    PLANS = {name: {**strategies, "seen": "data_parallel"} for name, strategies in PLANS.items()}


def initial(strategies: dict[str, str]) -> tuple[nn.Module | None, list[float]]:
    sharded = build(strategies)
    whole = sharded.gather()
    return whole, [*fit(sharded, range(3)), float(torch.rand(1))]


@pytest.mark.long("larger tables")
def test_tables_on_meta_start_alike_whatever_the_plan(sessions: Sessions) -> None:
    states, losses = [], []
    for nranks in NUMBERS:
        for strategies in PLANS.values():
            answers = sessions[nranks].run_all(initial, strategies)
            assert len({values[-1] for _, values in answers}) == 1, "the ranks draw the same numbers after it"
            states.append(answers[0][0].state_dict())
            losses.append(answers[0][1][0])
    for state in states:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-6)
    weight = states[0]["bags.embedding_bags.user.weight"]
    assert len(weight.unique()) > 0.9 * weight.numel(), "no two shards are alike"
    assert 0 < weight.abs().max() <= 40**-0.5, "init_fn's range"


def test_copies_are_alike_even_if_the_ranks_tables_were_not(sessions: Sessions) -> None:
    def copies() -> dict[str, torch.Tensor]:
        torch.manual_seed(dist.get_rank())
        sharded = shard(bags("cpu", ("a", 20, 8)), {"a": "data_parallel"}, batch_size=8)
        return dict(sharded.model.state_dict())

    first, second = sessions[2].run_all(copies)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("strategies", PLANS.values(), ids=PLANS)
def test_shard_frees_the_tables_that_it_was_given(sessions: Sessions, strategies: dict[str, str]) -> None:
    """A rank has no whole table, only its shards."""

    def left() -> list[str]:
        model = Clicks("cpu")
        given = {name: weakref.ref(p) for name, p in model.named_parameters() if "embedding" in name}
        values = {name: weight().detach().clone() for name, weight in given.items()}
        sharded = shard(model, strategies, batch_size=8, dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        del model
        gc.collect()
        whole = sharded.gather()
        if whole is not None and any(
            not torch.equal(whole.state_dict()[name], value) for name, value in values.items()
        ):
            raise AssertionError("the values are lost, too")
        return [name for name, weight in given.items() if weight() is not None]

    assert sessions[2].run_all(left) == [[], []]


def test_the_gathered_model_predicts_in_the_notebook(sessions: Sessions) -> None:
    def predict() -> tuple[nn.Module | None, torch.Tensor]:
        sharded = build(SPLIT)
        fit(sharded, range(5))
        bags, seen, _ = clicks(0, 99)
        return sharded.gather(), sharded.model(bags, seen).detach()

    model, expected = sessions[2].run(predict)
    assert type(model) is Clicks and type(model.bags) is EmbeddingBagCollection
    bags, seen, target = clicks(0, 99)
    torch.testing.assert_close(model(bags, seen), expected, rtol=0, atol=1e-6)
    assert {p.device.type for p in model.parameters()} == {"cpu"} and model.scale == 0.5
    nn.functional.mse_loss(model(bags, seen), target).backward()  # it can be trained further


def save(strategies: dict[str, str], folder: Path) -> tuple[nn.Module | None, list[float]]:
    """Train 3 steps, save, train 3 more: the model as saved, the losses after it."""
    sharded = build(strategies)
    fit(sharded, range(3))
    sharded.save(folder)
    return sharded.gather(), fit(sharded, range(3, 6))


def load(strategies: dict[str, str], folder: Path, optimizer: bool = True) -> tuple[nn.Module | None, list[float]]:
    sharded = build(strategies, seed=2)
    sharded.load(folder, optimizer=optimizer)
    return sharded.gather(), fit(sharded, range(3, 6))


@pytest.mark.parametrize(
    "strategies",
    [pytest.param(PLANS[name], id=name, marks=[MORE] if name.startswith("table_") else []) for name in PLANS],
)
@pytest.mark.parametrize(("n", "m"), [(2, 4), pytest.param(4, 2, marks=FOUR)])
def test_saved_on_n_ranks_and_loaded_on_m(
    sessions: Sessions, tmp_path: Path, strategies: dict[str, str], n: int, m: int
) -> None:
    saved, losses = sessions[n].run(save, strategies, tmp_path)
    if "column" in str(strategies):  # the state of the default optimizer is per block of columns, and those differ
        with pytest.raises(ValueError, match=r"optimizer's state .* does not fit"):
            sessions[m].run(load, strategies, tmp_path)
        loaded, _ = sessions[m].run(load, strategies, tmp_path, optimizer=False)
    else:
        loaded, after = sessions[m].run(load, strategies, tmp_path)
        # Ranks 2 and 3 see what 0 and 1 see: the mean gradient is one for 2 and for 4 ranks.
        assert after == pytest.approx(losses, abs=1e-5), "training goes on as if nothing had happened"
    torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)


def test_loaded_with_other_strategies(sessions: Sessions, tmp_path: Path) -> None:
    saved, losses = sessions[4].run(save, PLANS["row_wise"], tmp_path)
    loaded, after = sessions[2].run(load, PLANS["table_wise"], tmp_path)
    torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)
    assert after == pytest.approx(losses, abs=1e-5)
    for strategies in PLANS.values():
        loaded, _ = sessions[2].run(load, strategies, tmp_path, optimizer=False)
        torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)


@pytest.mark.long("larger tables")
def test_sequences_of_different_lengths(sessions: Sessions) -> None:
    def losses(strategies: dict[str, str]) -> list[list[float]]:
        return sessions[4].run_all(lambda: fit(build(strategies), range(4), (8, 1, 3, 5)))

    first = losses(PLANS["table_wise"])
    for strategies in PLANS.values():
        # The first step has the same weights; later ones differ a little where columns are cut.
        torch.testing.assert_close(torch.tensor(losses(strategies))[:, 0], torch.tensor(first)[:, 0], rtol=0, atol=1e-6)


def test_equal_steps_end_with_the_shortest_rank(sessions: Sessions) -> None:
    def steps() -> list[int]:
        return list(equal_steps(range(3 + 2 * dist.get_rank())))

    assert sessions[4].run_all(steps) == [[0, 1, 2]] * 4
    assert sessions[2].run_all(lambda: list(equal_steps(range(5 if dist.get_rank() else 0)))) == [[], []]


@pytest.mark.parametrize("strategy", [*SEQUENCE_STRATEGIES, *(pytest.param(one, marks=MORE) for one in OTHERS)])
def test_outputs_are_in_the_order_of_the_features(sessions: Sessions, strategy: str) -> None:
    """TorchRec's own are in the order of the ranks that hold them."""
    assert_same(sessions[2], Case(strategy, rows=(2, 30, 7, 50, 6), mean=True, steps=3))


@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        pytest.param(strategy, other, marks=[] if strategy == "row_wise" or other == "data_parallel" else [MORE])
        for strategy in ROW_STRATEGIES
        for other in STRATEGIES
    ],
)
def test_means_in_a_collection_of_several_strategies(sessions: Sessions, strategy: str, other: str) -> None:
    assert_same(sessions[2], Case(strategy, {"table_1": other}, mean=True, batches=(5, 2, 5, 5)))


def refused(**options: Any) -> str:
    """In a rank: what `shard` says, with all ranks agreeing."""
    case: Case = options.pop("case", Case())
    model = options.pop("model", None) or case.tables("meta")
    with pytest.raises(ValueError) as caught:
        shard(model, options.pop("strategies", {}), batch_size=8, **options)
    return str(caught.value)


def bags(device: str, *sizes: tuple[str, int, int]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=columns, feature_names=[name])
        for name, rows, columns in sizes
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device(device))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (
            {"optimizer": "adam", "fused": True},
            r"must be one of sgd, adagrad, rowwise_adagrad on CPU ranks, got 'adam'",
        ),
        ({"optimizer": "lamb"}, r"must be one of sgd, adagrad, rowwise_adagrad, adam on CPU ranks, got 'lamb'"),
        ({"optimizer": "lamb", "fused": False}, r"must be one of sgd, .* on CPU ranks, got 'lamb'"),
        ({"optimizer": {"table_0": "sgd"}}, r"optimizer= has no entry for table 'table_1': add it, or '\*'"),
        ({"lr": {"users": 0.1, "*": 1.0}}, r"'users' matches no table; there are table_0, table_1"),
        ({"optimizer": "adamw"}, "`optimizer` must be one of sgd, adagrad.* got 'adamw'"),
        ({"strategies": {"*": "rowwise"}}, r"'rowwise' is not a sharding strategy; choose one of table_wise, row_wise"),
        ({"strategies": {"users*": "row_wise"}}, r"'users\*' matches no table; there are table_0, table_1"),
        (
            {"strategies": {"table_1": "column_wise"}, "case": Case(columns=36)},
            r"table 'table_1' cannot be column_wise on 4 ranks: 36 columns in 4 parts: .* multiple of 16",
        ),
        (
            {"strategies": {"*": "grid_shard"}, "case": Case(columns=4)},
            rf"'table_0' cannot be grid_shard .* {'2 parts' if has_grid_shard() else 'take torch 2.6 or newer'}",
        ),
        ({"case": Case(columns=6), "strategies": {"*": "row_wise"}}, r"'table_0' cannot be row_wise .* 6 columns"),
        (
            {"case": Case(rows=(5,)), "strategies": {"*": "row_wise"}},
            r"'table_0' cannot be row_wise .* 5 rows to 3 of 4 ranks",
        ),
        (
            {"model": nn.Linear(2, 2)},
            r"Linear has no PooledTables, .* EmbeddingBagCollection or EmbeddingCollection: nothing",
        ),
        (
            {"model": bags("meta", ("small", 100, 16), ("big", 50_000, 64)), "memory_bytes": 2**20},
            r"do not fit on 4 ranks with 1,048,576 bytes each. .* table 'big' .*bytes on one rank",
        ),
        (
            {"model": bags("meta", ("big", 20_000, 64)), "memory_bytes": 2**21, "strategies": {"big": "table_wise"}},
            r"table 'big' \(table_wise\), which needs 5,\d\d\d,\d\d\d bytes.*a strategy that splits the table",
        ),
        (
            {"model": Clicks(), "strategies": {"seen": "grid_shard"}},
            r"'seen' cannot be grid_shard .* EmbeddingCollection",
        ),
        ({"model": Clicks()}, r"other parameters than its tables \(over.0.weight, .*dense_optimizer"),
    ],
)
def test_invalid_plans_are_refused_before_sharding(sessions: Sessions, options: dict[str, Any], pattern: str) -> None:
    options = {"dense_optimizer": torch.optim.SGD} | options if "seen" in str(options.get("strategies")) else options
    answers = sessions[4].run_all(refused, **options)
    assert len(set(answers)) == 1 and re.search(pattern, answers[0]), answers[0]


def test_sequences_are_refused_where_fbgemm_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up of sequences crashed on CPUs with torch 2.5 to 2.7."""
    assert lacks_sequences() == (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8))
    config = EmbeddingConfig(name="seen", num_embeddings=30, embedding_dim=16, feature_names=["seen"])
    table = Table("seen", "seen", config, torch.zeros(30, 16), pooled=False)
    monkeypatch.setattr("nbdist.recsys.sharding.strategies.lacks_sequences", lambda: True)
    for strategy in SEQUENCE_STRATEGIES:
        why = refusal(strategy, table, "sgd", 2, 2, "cpu")
        assert not refusal(strategy, table, "sgd", 2, 2, "cuda")
        assert bool(why) == (strategy != "data_parallel") and ("take torch 2.8 or newer" in why) == bool(why)


def test_a_grid_is_refused_where_torchrec_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_grid_shard() == (tuple(map(int, torch.__version__.split(".")[:2])) > (2, 5))
    config = EmbeddingBagConfig(name="seen", num_embeddings=30, embedding_dim=16, feature_names=["seen"])
    table = Table("seen", "seen", config, torch.zeros(30, 16), pooled=True)
    monkeypatch.setattr("nbdist.recsys.sharding.strategies.has_grid_shard", lambda: False)
    why = {one: refusal(one, table, "sgd", 2, 2, "cpu") for one in ALL_STRATEGIES}
    assert [one for one in why if why[one]] == ["grid_shard"] and "take torch 2.6 or newer" in why["grid_shard"]


def test_shard_is_refused_outside_a_rank() -> None:
    with pytest.raises(RuntimeError, match="in_ddp"):
        shard(bags("meta", ("a", 8, 8)), batch_size=8)


def test_names_go_before_globs_and_the_planner_takes_the_rest(sessions: Sessions) -> None:
    def plan() -> Plan:
        model = bags("meta", *((name, 64, 16) for name in ("user_a", "user_b", "movie", "other")))
        return shard(model, {"user_*": "row_wise", "user_b": "table_wise", "m*": "column_wise"}, batch_size=8).plan

    strategies = sessions[2].run(plan).strategies
    assert {**strategies, "other": "?"} == {
        "user_a": "row_wise",
        "user_b": "table_wise",
        "movie": "column_wise",
        "other": "?",
    }
    assert strategies["other"] in STRATEGIES


def test_a_topology_and_kernels_of_ones_own(sessions: Sessions) -> None:
    def plan() -> Any:
        model = lambda: bags("meta", ("user", 64, 16), ("movie", 8_000, 16))  # noqa: E731
        known = {"created_by_factory": True} if "created_by_factory" in signature(Topology).parameters else {}
        options: dict[str, Any] = {"world_size": 2, "compute_device": "cpu", "local_world_size": 2, **known}
        # As if rank 0 had memory for the small table alone: the planner must believe it.
        small = Topology(**options)
        for one, cap in zip(small.devices, (100_000, 5_000_000), strict=True):
            one.storage.ddr = cap
        sharded = shard(model(), {"*": "table_wise"}, batch_size=8, compute_kernels={"*": "fused"}, topology=small)
        for wrong, options in (
            ("must be one of fused on a cpu rank, got 'fused_uvm'", {"compute_kernels": {"*": "fused_uvm"}}),
            ("'u' matches no table", {"compute_kernels": {"u": "fused"}}),
            ("of 2 cpu ranks, got one of 3 cpu ranks", {"topology": Topology(3, "cpu", local_world_size=3, **known)}),
            ("`memory_bytes` must be None with `topology`", {"topology": small, "memory_bytes": 10**6}),
        ):
            with pytest.raises(ValueError, match=wrong):
                shard(model(), batch_size=8, **options)
        with pytest.raises(TypeError, match=r"must be a torchrec.* got 3"):
            shard(model(), batch_size=8, topology=3)
        return {one.table: one.rank for one in sharded.plan.shards}

    assert sessions[2].run(plan)["movie"] == 1


def test_large_tables_are_not_copied_unasked(sessions: Sessions) -> None:
    def plan(strategies: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
            for name, rows in {"large": 70_000, "small": 100}.items()
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
            made = shard(model, strategies, batch_size=64).plan
        return [str(one.message) for one in caught if "data_parallel" in str(one.message)], made.strategies

    (said, chosen), (not_said, _) = sessions[2].run_all(plan, {"*": "data_parallel"})
    assert chosen["large"] == "data_parallel" and not not_said
    assert (
        len(said) == 1
        and "'large' is sharded as data_parallel: each step sends" in said[0]
        and "70,000 rows" in said[0]
    )
    said, chosen = sessions[2].run(plan, {})
    assert not said and chosen["large"] != "data_parallel"


def a_step(sharded: Sharded) -> None:
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 0]), lengths=torch.tensor([1, 1, 0, 1]))
    sharded.model(features).values().sum().backward()


def two_tables() -> Sharded:
    return shard(bags("cpu", ("a", 40, 16), ("b", 30, 16)), {"a": "table_wise", "b": "row_wise"}, batch_size=2)


def test_ids_and_how_many_there_are_go_at_once(sessions: Sessions) -> None:
    def meetings() -> int:
        group, sharded = shared_group(), two_tables()
        a_step(sharded)
        before = group.collectives.turns
        a_step(sharded)
        return group.collectives.turns - before

    # For both strategies: once for the ids, once for the rows, once for their gradients.
    assert sessions[2].run_all(meetings) == [6, 6]


def test_ids_that_lie_apart_in_memory(sessions: Sessions) -> None:
    def outputs() -> bool:
        sharded, lengths = two_tables(), torch.tensor([1, 1, 0, 1])
        apart = torch.tensor([[1, 9], [2, 9], [0, 9]])[:, 0]
        assert not apart.is_contiguous()
        found = [
            sharded.model(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)).values()
            for ids in (apart, apart.contiguous())
        ]
        return torch.equal(*found)

    assert sessions[2].run_all(outputs) == [True, True]


def test_tables_are_in_huge_pages(sessions: Sessions) -> None:
    def huge(start: int, size: int) -> int:
        """Return how many bytes of the mappings that have these bytes are in huge pages."""
        inside, found = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if heads := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                begin, end = (int(one, 16) for one in heads.groups())
                inside = begin < start + size and start < end
            elif inside and line.startswith("AnonHugePages:"):
                found += int(line.split()[1]) * 1024
        return found

    def tables() -> tuple[int, int, list[int]]:
        config = EmbeddingBagConfig(name="a", num_embeddings=2**17, embedding_dim=32, feature_names=["a"])
        model = nn.ModuleDict({"bags": EmbeddingBagCollection(tables=[config])})
        sharded = shard(model, {"a": "row_wise"}, batch_size=8, optimizer="adagrad")
        (kernel,) = kernels(sharded.optimizer)
        (weights,), ((state,),) = kernel.split_embedding_weights(), kernel.split_optimizer_states()
        with mmap.mmap(-1, 2**23, flags=mmap.MAP_PRIVATE) as probe:
            memory = torch.frombuffer(probe, dtype=torch.uint8).fill_(1)
            gather(memory.data_ptr(), memory.nbytes)
            possible = huge(memory.data_ptr(), memory.nbytes)
            del memory
        return possible, weights.nbytes, [huge(one.data_ptr(), one.nbytes) for one in (weights, state)]

    for possible, size, found in sessions[2].run_all(tables):
        assert min(found) >= (size - 2**22 if possible else 0), (possible, size, found)


def test_names_of_pieces_are_given_to_a_profiler_alone(sessions: Sessions) -> None:
    def names(profiled: bool) -> list[str]:
        given: list[str] = []
        sharded, begin = two_tables(), record_function.__enter__

        def entered(self: record_function) -> record_function:
            given.append(self.name)
            return begin(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record_function, "__enter__", entered)
            with torch.autograd.profiler.profile(enabled=profiled):
                a_step(sharded)
        return given

    rarely, all_of_them = sessions[2].run(names, False), sessions[2].run(names, True)
    assert len(rarely) < 5 < 20 < len(all_of_them), rarely
    assert any("All2All_Pooled_fwd" in name for name in all_of_them)


def test_the_planner_knows_how_fast_this_machine_is(sessions: Sessions) -> None:
    def measured(group: Any) -> tuple[float, float]:
        found = measure(torch.device("cpu"), group)
        return found.memory, found.ranks

    def in_a_millisecond() -> tuple[tuple[float, float], tuple[float, float]]:
        looks, group = itertools.count(), shared_group()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 1000))
            again = measured(group)
            bandwidth.measured.clear()
            return again, measured(group)

    first, second = sessions[2].run_all(lambda: measured(shared_group()))
    assert first == second and min(first) > 0
    anew = (2.0**33, 2.0**32)
    assert sessions[2].run_all(in_a_millisecond) == [(first, anew)] * 2, "8 MB, and 4 MB, in powers of two"

    def work(memory: float, ranks: float) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "measure", lambda *_: Bandwidth(memory, ranks))
            made = shard(bags("meta", ("a", 400, 16)), {"*": "table_wise"}, batch_size=64)
        return float(made.plan.frame["work"].sum())

    fast, slow_memory, slow_ranks = (sessions[2].run(work, *one) for one in ((1e10, 1e10), (1e7, 1e10), (1e10, 1e7)))
    assert slow_memory > 5 * fast and slow_ranks > 5 * fast


def test_works_again_after_a_rank_has_failed() -> None:
    """The process group is made again then; TorchRec would go on with groups inside the old one."""

    def fail() -> None:
        shard(bags("meta", ("a", 40, 16)), {"*": "table_row_wise"}, batch_size=8)
        if dist.get_rank():
            raise ZeroDivisionError
        dist.barrier()

    with Session(2) as session:
        with pytest.raises(ZeroDivisionError):
            session.run(fail)
        for strategy in OTHERS:
            assert_same(session, Case(strategy, steps=2))


PLAN = Plan(
    (
        PlanShard("a<b", "row_wise", 0, 0, 30, 0, 16, 1920, 3_000_000, 1.0),
        PlanShard("a<b", "row_wise", 1, 30, 20, 0, 16, 1280, 1_000_000, 0.5),
        PlanShard("c", "table_wise", 1, 0, 5, 0, 16, 320, 2_000_000, 0.5),
    ),
    nranks=3,
)


def test_a_plan_to_look_at() -> None:
    page = PLAN._repr_html_()
    assert "a&lt;b" in page and "rank 2" in page and "rows 30–49<br>columns 0–15<br>1.25 KiB" in page
    assert page.count("<tr>") == 1 + 2 + 3 and "2.00 × the mean work" not in page
    assert list(PLAN.frame.columns) == "table strategy rank row rows column columns bytes memory work".split()
    assert PLAN.ranks["memory"].tolist() == [3_000_000, 3_000_000, 0] and PLAN.ranks["shards"].tolist() == [1, 2, 0]
    assert PLAN.imbalance("memory") == pytest.approx(1.5) and PLAN.imbalance("work") == pytest.approx(1.5)
    assert "a<b" in repr(PLAN) and "30–49" in repr(PLAN) and "1.50 × the mean memory" in repr(PLAN)
    axes = PLAN.plot()
    heights = [patch.get_height() for patch in axes[0].patches]
    assert sum(heights) == pytest.approx(6_000_000 / 2**20) and "1.50" in axes[0].get_title()
    assert axes[0].get_figure() is not None
    assert "None" not in page


@pytest.mark.long("larger tables")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps_rollup")
def test_memory_of_a_row_wise_table_while_it_is_built() -> None:
    """Private memory of all ranks over a first, tiny shard() call's: at most 1.1 × the table, at its highest.

    Pages that a rank shares with its fork server become private when they are written: some megabytes, whatever the
    table has.
    """
    rows, columns = 3_000_000, 64

    def grow() -> tuple[float, float]:
        shard(bags("meta", ("tiny", 400, columns)), {"*": "row_wise"}, batch_size=8)  # loads what is loaded once
        before, peak, done = private(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.002):
                peak = max(peak, private())

        watcher = threading.Thread(target=watch)
        watcher.start()
        sharded = shard(bags("meta", ("big", rows, columns)), {"*": "row_wise"}, batch_size=8)
        done.set()
        watcher.join()
        held = private()
        del sharded
        return max(peak, held) - before, held - before

    def private() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))

    with Session(4) as session:
        answers = session.run_all(grow)
    table = rows * columns * 4
    peak, held = (sum(values) / table for values in zip(*answers, strict=True))
    print(f"table {table:,} bytes; over 4 ranks at most {peak:.3f} x while built, {held:.3f} x afterwards")
    assert 0.95 < held <= peak <= 1.1


def test_installed_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torchrec()
    assert matching("2.11.0")["torchrec"] == "1.6.1" and matching("2.5.1")["fbgemm-gpu"] == "1.0.0"
    with pytest.raises(ImportError, match=r"older than 2\.5"):
        matching("2.4.0")
    with pytest.raises(ImportError, match=r"knows a TorchRec for torch up to 2\.\d\d"):
        matching("2.99.0")
    pair = r"install the pair torchrec==1\.8\.0 and fbgemm-gpu-cpu==1\.8\.0"
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")

    def versions(**found: str) -> None:
        names = {"torchrec": "1.8.0"} | {name.replace("_", "-"): version for name, version in found.items()}
        monkeypatch.setattr("nbdist.recsys.versions.installed", names.get)

    versions(fbgemm_gpu_cpu="1.7.0")
    with pytest.raises(ImportError, match=rf"fbgemm-gpu-cpu 1.7.0 .* a different release of torch. (.|\n)*{pair}"):
        check_torchrec()
    versions(fbgemm_gpu="1.8.0", fbgemm_gpu_cpu="1.8.0")
    with pytest.raises(ImportError, match="both installed"):
        check_torchrec()
    versions(fbgemm_gpu_cpu="1.8.0")
    check_torchrec()


def test_a_gpu_that_fbgemm_has_no_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4, say; the package is here."""
    check_gpu(torch.device("cpu"))
    asked: list[torch.device] = []

    def ones(*shape: int, device: torch.device, **options: Any) -> torch.Tensor:
        asked.append(device)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nand much more")

    monkeypatch.setattr(torch, "ones", ones)  # in place of FBGEMM, which gets a CPU's tensors here
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"Tesla T4 of compute capability 7\.5: .* on the device\. .*replicate\("):
        check_gpu(torch.device("cuda", 0))
    assert asked == [torch.device("cuda", 0)]

    def no_cuda(*shape: int, **options: Any) -> torch.Tensor:
        raise NotImplementedError("Could not run 'fbgemm::asynchronous_complete_cumsum' from the 'CUDA' backend")

    monkeypatch.setattr(torch, "ones", no_cuda)
    with pytest.raises(ImportError, match=r"works on CPUs alone, .* pip install --no-deps torchrec=="):
        check_gpu(torch.device("cuda", 0))


def test_fbgemms_warnings_at_import_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Warnings such as FBGEMM 1.6 logs, once for each of its libraries, are left out; an error stays."""
    (tmp_path / "fbgemm_gpu").mkdir()
    script = tmp_path / "fbgemm_gpu" / "__init__.py"
    script.write_text(
        "import logging\n"
        "for _ in range(14): logging.warning('_fbgemm_torch_compat_table has no entry for 1.6.0 of FBGEMM')\n"
        "logging.error('Could not load the library')\n"
    )
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr("importlib.import_module", lambda name: name == "fbgemm_gpu" and runpy.run_path(str(script)))
    check_torchrec()
    assert capfd.readouterr().err == "ERROR:root:Could not load the library\n"
    assert logging.root.handlers == [] and not logging.root.filters


def test_the_pair_as_pip_takes_it() -> None:
    printed = subprocess.run([sys.executable, "-m", "nbdist.recsys.versions"], capture_output=True, text=True).stdout
    assert printed.split() == list(pair_for_this_torch()) and printed.startswith("torchrec==")


def test_requirements_and_documentation_have_the_same_pairs() -> None:
    """The pairs for the torch of constraints.txt are in requirements/, all pairs in the documentation."""
    root = Path(__file__).parents[3]
    found = re.search(r"^torch==(\S+)", (root / "constraints.txt").read_text(), re.M)
    assert found is not None
    versions = matching(found[1])
    for build, file in (("fbgemm-gpu", "torchrec-cuda.txt"), ("fbgemm-gpu-cpu", "torchrec-cpu.txt")):
        wanted = [f"torchrec=={versions['torchrec']}", f"{build}=={versions[build]}"]
        lines = (root / "requirements" / file).read_text().splitlines()
        assert [line for line in lines if not line.startswith("#")] == wanted
    page = (root / "docs/how-to/install.md").read_text()
    for torch_release, versions in releases().items():
        cells = [".".join(map(str, torch_release)), *versions.values()]
        assert f"| {' | '.join(cells)} |" in page


@pytest.mark.long("other environments")
@pytest.mark.started
@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        ("torchrec", "TorchRec is not installed"),
        ("fbgemm_gpu", "needs FBGEMM, which is not installed"),
        ("tensordict", "needs the module tensordict"),
    ],
)
def test_something_missing(hidden: str, says: str) -> None:
    """In a fresh interpreter in which one package cannot be found."""
    code = f"""
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
hide = lambda cls, name, *rest: None if name.partition(".")[0] == {hidden!r} else find(name, *rest)
importlib.machinery.PathFinder.find_spec = classmethod(hide)
import nbdist.recsys.sharding  # without a word
from nbdist.recsys.versions import check_torchrec
check_torchrec()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and says in done.stderr and "ImportError" in done.stderr, done.stderr
    assert "torchrec==" in done.stderr and "--no-deps" in done.stderr


@pytest.mark.started
def test_import_nbdist_leaves_torchrec_out() -> None:
    code = (
        "import sys, nbdist, nbdist.recsys.datasets; assert not {'torch', 'torchrec', 'fbgemm_gpu'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Tables with sparse gradients, in common or copied: trained as in one process, saved, loaded, clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.recsys.parallel.common_tables import CommonTables
from nbdist.recsys.parallel.copied_tables import CopiedTables
from nbdist.recsys.parallel.replicated import Replicated
from nbdist.recsys.parallel.row_steps import step_rows
from nbdist.recsys.sharding import replicate

ROWS = 3_000
States = dict[str, torch.Tensor]


class Model(nn.Module):
    """Tables of different widths, one of them looked up in bags, and a layer over them."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = nn.Embedding(ROWS, 4, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=True)
        self.seldom = nn.Embedding(10, 1, sparse=True)
        self.over = nn.Linear(7, 1) if dense else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.one(ids), self.bags(torch.stack([ids, ids // 2], 1))], 1)
        found = both.sum(1) if self.over is None else self.over(both).squeeze(1)
        return found + self.seldom(torch.tensor([3])).squeeze() if len(ids) > 20 else found


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), lr=0.1)


def batch(step: int) -> torch.Tensor:
    """Return a batch of all ranks: rows that come again, and some that are popular."""
    draw = torch.Generator().manual_seed(step)
    return torch.cat([torch.randint(ROWS, (40,), generator=draw), torch.randint(5, (24,), generator=draw)])


def divided(ids: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """Divide a batch among ranks: the last one gets more than others."""
    part = len(ids) // (2 * ranks)
    return ids.split([part] * (ranks - 1) + [len(ids) - part * (ranks - 1)])


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - ids % 7).square().mean()


Make = Callable[[Any], torch.optim.Optimizer]


def on_every_rank(model: nn.Module, optimizer: Make, copied: bool) -> Replicated:
    """In a rank: with tables in common; or with copies, as on GPUs and on several machines."""
    options = {"process_group": dist.new_group()} if copied else {}
    replicated = replicate(model, optimizer, **options)
    assert type(replicated._tables) is (CopiedTables if copied else CommonTables)
    return replicated


def trained(
    optimizer: Make, copied: bool, dense: bool, steps: range, clip: float, folder: Any = None
) -> tuple[States, list[float]]:
    """In a rank: weights after some steps, from a checkpoint where there is one, which is written at the end."""
    replicated = on_every_rank(Model(dense), optimizer, copied)
    if folder and steps.start:
        replicated.load(folder)
    norms = []
    for step in steps:
        replicated.optimizer.zero_grad()
        loss_of(replicated.model, divided(batch(step), dist.get_world_size())[dist.get_rank()]).backward()
        if clip:
            norms.append(replicated.clip_gradients(clip))
        replicated.optimizer.step()
    if folder:
        replicated.save(folder)
    return {name: value.clone() for name, value in replicated.module.state_dict().items()}, norms


def alone(optimizer: Make, dense: bool, clip: float, ranks: int) -> Any:
    """The same in this process."""
    model = Model(dense)
    stepped = optimizer(model.parameters())
    norms = []
    for step in range(6):
        stepped.zero_grad()
        torch.stack([loss_of(model, ids) for ids in divided(batch(step), ranks)]).mean().backward()
        if clip:
            grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = p.grad * min(1.0, clip / (norms[-1] + 1e-6))
        stepped.step()
    return model.state_dict(), norms


THREE = pytest.mark.long("more optimizers on three ranks")
COPIED = pytest.mark.parametrize("copied", [False, True], ids=["common", "copied"])


@COPIED
@pytest.mark.parametrize(
    ("ranks", "optimizer", "dense", "clip"),
    [
        *((2, adagrad, True, 0.0), (2, sgd, True, 0.0), (2, sparse_adam, False, 0.0), (2, sgd, False, 0.5)),
        (3, adagrad, True, 0.5),
        pytest.param(2, adagrad, True, 0.5, marks=THREE),
        *(pytest.param(3, *how, marks=THREE) for how in ((adagrad, True, 0.0), (sgd, True, 0.0))),
        *(pytest.param(3, *how, marks=THREE) for how in ((sparse_adam, False, 0.0), (sgd, False, 0.5))),
    ],
)
def test_ranks_train_what_one_process_trains(
    sessions: Sessions, ranks: int, copied: bool, optimizer: Any, dense: bool, clip: float
) -> None:
    wanted, norms = alone(optimizer, dense, clip, ranks)
    for weights, seen in sessions[ranks].run_all(trained, optimizer, copied, dense, range(6), clip):
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
        assert seen == pytest.approx(norms, rel=1e-4)


def test_a_step_of_adagrad_is_torchs_own_with_any_options() -> None:
    for options in ({}, {"lr_decay": 0.5, "eps": 1e-3}, {"maximize": True, "initial_accumulator_value": 2.0}):
        tables = [nn.Parameter(torch.linspace(-1, 1, 5 * ROWS).view(ROWS, 5)) for _ in range(2)]
        ours, torchs = (torch.optim.Adagrad([table], lr=torch.tensor(0.1), **options) for table in tables)
        for step in range(4):
            ids = torch.empty(0, dtype=torch.int64) if step == 2 else batch(step)
            for table in tables:
                draw = torch.Generator().manual_seed(step)
                rows = torch.randn(len(ids), 5, generator=draw)
                table.grad = torch.sparse_coo_tensor(ids[None], rows, table.shape)
            torchs.step()
            assert step_rows(ours, tables) == [tables[0]]
        torch.testing.assert_close(tables[0], tables[1])
        torch.testing.assert_close(ours.state[tables[0]], torchs.state[tables[1]])


def test_weight_decay_is_refused_as_by_torch(sessions: Sessions) -> None:
    def train() -> None:
        replicated = replicate(Model(), lambda some: torch.optim.Adagrad(some, lr=0.1, weight_decay=0.1))
        loss_of(replicated.model, batch(0)).backward()
        replicated.optimizer.step()

    with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse gradients"):
        sessions[2].run(train)


@COPIED
@pytest.mark.parametrize("optimizer", [adagrad, sgd])
def test_a_step_may_have_a_closure(sessions: Sessions, copied: bool, optimizer: Any) -> None:
    def train(named: bool) -> tuple[States, float, torch.Tensor]:
        replicated = on_every_rank(Model(), optimizer, copied)

        def closure(ids: torch.Tensor) -> torch.Tensor:
            replicated.optimizer.zero_grad()
            loss = loss_of(replicated.model, ids)
            loss.backward()
            return loss

        for step in range(6):
            of_step = functools.partial(closure, divided(batch(step), 2)[dist.get_rank()])
            loss = replicated.optimizer.step(closure=of_step) if named else replicated.optimizer.step(of_step)
        left = replicated.module.one.weight.grad
        return {k: v.clone() for k, v in replicated.module.state_dict().items()}, float(loss), left

    wanted, _ = alone(optimizer, True, 0.0, 2)
    for named in (False, True):
        weights, loss, left = sessions[2].run(train, named)
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
        assert loss > 0 and left.is_sparse and left._nnz()


@COPIED
@pytest.mark.parametrize(("optimizer", "dense"), [(adagrad, True), (sparse_adam, False)])
def test_a_checkpoint_goes_on_with_what_the_optimizer_keeps(
    sessions: Sessions, tmp_path: Path, copied: bool, optimizer: Any, dense: bool
) -> None:
    wanted, _ = sessions[2].run(trained, optimizer, copied, dense, range(6), 0.0)
    sessions[2].run(trained, optimizer, copied, dense, range(3), 0.0, tmp_path)
    found, _ = sessions[2].run(trained, optimizer, copied, dense, range(3, 6), 0.0, tmp_path)
    torch.testing.assert_close(found, wanted)
    sessions[3].run(trained, optimizer, copied, dense, range(6, 7), 0.0, tmp_path)  # on as many ranks as one likes


def test_tables_are_in_memory_once(sessions: Sessions) -> None:
    def look() -> float:
        replicated = replicate(Model(), adagrad)
        state = replicated.optimizer.state[replicated.module.one.weight]["sum"]
        if dist.get_rank() == 0:
            replicated.module.one.weight.data[7] = 5.0
            state[7] = 6.0
        dist.barrier()
        return float(replicated.module.one.weight[7, 0]) + float(state[7, 0])

    assert sessions[2].run_all(look) == [11.0, 11.0]


@COPIED
def test_a_step_that_is_left_out_leaves_nothing_behind(sessions: Sessions, copied: bool) -> None:
    def train(leaves_out: bool) -> States:
        replicated = on_every_rank(Model(), adagrad, copied)
        for step in range(4):
            if leaves_out and step == 2:
                loss_of(replicated.model, batch(9)).backward()
                replicated.clip_gradients(0.1)  # and it was too large, say
                replicated.optimizer.zero_grad()
            loss_of(replicated.model, divided(batch(step), 2)[dist.get_rank()]).backward()
            replicated.optimizer.step()
            replicated.optimizer.zero_grad()
        return {name: value.clone() for name, value in replicated.module.state_dict().items()}

    torch.testing.assert_close(sessions[2].run(train, True), sessions[2].run(train, False))


@COPIED
def test_gradients_without_zero_grad_add_up(sessions: Sessions, copied: bool) -> None:
    def train(common: bool) -> States:
        model = Model()
        parts = [divided(batch(step), 2) for step in range(4)]
        if common:
            replicated = on_every_rank(model, sgd, copied)
            optimizer = replicated.optimizer
        else:
            optimizer = sgd(model.parameters())
        for i, part in enumerate([*parts, None]):  # the last step has no batch of its own
            if part is not None and common:
                loss_of(replicated.model, part[dist.get_rank()]).backward()
            elif part is not None:
                torch.stack([loss_of(model, ids) for ids in part]).mean().backward()
            if common and i % 2:
                replicated.clip_gradients(1e9)
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    torch.testing.assert_close(sessions[2].run(train, True), train(False), rtol=1e-4, atol=1e-5)


def test_gather_returns_a_plain_model(sessions: Sessions) -> None:
    def train() -> Any:
        replicated = replicate(Model(), adagrad)
        return replicated.gather(), replicated.module

    for model in sessions[2].run(train):
        before = model.one.weight.detach().clone()
        loss_of(model, batch(0)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert not torch.equal(model.one.weight, before)
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


class Waits(TorchDispatchMode):
    """The operations on sparse gradients for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "coalesce" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_one_rank_does_not_read_the_rows_of_a_gradient(sessions: Sessions) -> None:
    def look() -> tuple[list[str], str]:
        replicated = on_every_rank(Model(), sgd, True)
        loss_of(replicated.model, batch(0)).backward()
        with Waits() as waits:
            replicated._tables.exchange()  # type: ignore[union-attr]
        weight = replicated.module.one.weight
        weight.grad = torch.zeros_like(weight)
        with pytest.raises(RuntimeError) as caught:
            replicated.optimizer.step()
        return waits.found, str(caught.value)

    waited, said = sessions[1].run(look)
    assert waited == []
    assert said.startswith("one.weight has a dense gradient")


class Tied(nn.Module):
    """Rows are looked up, and the whole table is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.rows(ids) @ self.rows.weight.T).mean(1)


class Heavy(torch.optim.SGD):
    """An optimizer that is not torch's own."""


def test_unsupported_uses_of_shared_tables_are_refused(sessions: Sessions) -> None:
    def step(model: nn.Module, optimizer: Any, copied: bool = False) -> None:
        replicated = on_every_rank(model, optimizer, copied)
        loss_of(replicated.model, batch(0)).backward()
        replicated.optimizer.step()

    with pytest.raises(RuntimeError, match=r"rows\.weight has a dense gradient.*sparse=False"):
        sessions[2].run(step, Tied(), sgd)
    with pytest.raises(RuntimeError, match=r"rows\.weight has a dense gradient.*sparse=False"):
        sessions[2].run(step, Tied(), sgd, True)
    with pytest.raises(RuntimeError, match=r"Heavy keeps momentum_buffer of one\.weight as a sparse tensor"):
        sessions[2].run(step, Model(), lambda parameters: Heavy(parameters, lr=0.1, momentum=0.9))


def test_tables_with_a_largest_norm_are_copied(sessions: Sessions) -> None:
    def train() -> bool:
        replicated = replicate(nn.Embedding(10, 2, sparse=True, max_norm=1.0), sgd)
        replicated.model(torch.tensor([dist.get_rank()])).sum().backward()
        replicated.optimizer.step()
        return type(replicated._tables) is CopiedTables

    assert sessions[2].run_all(train) == [True, True]

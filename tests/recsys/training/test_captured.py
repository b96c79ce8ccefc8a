"""Captured steps: what they learn is what others learn, whatever comes between them; what cannot be captured is said.

On CPUs a "graph" is the Python that would be recorded: everything else is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from torch import nn

from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.parallel.device_rows import adagrad_rows
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import Snapshots, fit, warmup_decay
from nbdist.recsys.training.history import History

#: A second thread would do nothing but wait for the first: the models are that small.
OPTIONS = {"threads": 1}
States = dict[str, torch.Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


class Imitation:
    """Stands in for `Recorder`: replays what was recorded by calling it."""

    replays = 0

    def rehearse(self, work: Callable[[], None]) -> str:
        work()
        return ""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            type(self).replays += 1
            work()

        return replay


class Clicks(nn.Module):
    def __init__(self, sparse: bool, dropout: float) -> None:
        super().__init__()
        self.user, self.movie, self.hour = (nn.Embedding(*size, sparse=sparse) for size in ((50, 8), (30, 8), (24, 4)))
        self.tower = nn.Sequential(
            nn.BatchNorm1d(20), nn.Linear(20, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        found = [table(batch[name]) for name, table in self.named_children() if name != "tower"]
        return self.tower(torch.cat(found, dim=1)).squeeze(1)  # type: ignore[no-any-return]


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch), batch["liked"]


def rows() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    user, movie, hour = (torch.randint(size, (1000,), generator=draw) for size in (50, 30, 24))
    return {"user": user.int(), "movie": movie, "hour": hour.int(), "liked": torch.rand(1000, generator=draw) < 0.4}


def train(
    make: Make,
    captured: bool | None,
    *,
    sparse: bool = False,
    dropout: float = 0.0,
    data: dict[str, Any] | None = None,
    breaks_after: int = 10**9,
    **options: Any,
) -> tuple[History, States, list[torch.Tensor], int]:
    """In a rank: history, weights, state of the optimizer, and how often a graph was replayed."""
    from nbdist.recsys.training import captured as module

    calls = 0

    def forward(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += model.training
        if calls > breaks_after:
            raise ZeroDivisionError
        return predict(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Recorder", Imitation)
        patch.setattr(module, "no_gpu", lambda: "")
        patch.setattr(module, "WORTH", 50)
        torch.manual_seed(0)
        Imitation.replays = 0
        model = replicate(Clicks(sparse, dropout), make, process_group=dist.group.WORLD)
        loader = MemoryLoader(data or rows(), 32, shuffle=True, seed=5)
        valid = MemoryLoader(data or rows(), 100)
        every = {"steps": 75, "log_every": 21, "eval_every": 42, "progress": False}
        history = fit(model, forward, loader, valid, captured=captured, **every | options)
    state = [
        torch.as_tensor(value).float()
        for one in model.module.parameters()
        for _, value in sorted(model.optimizer.state.get(one, {}).items())
        if value is not None
    ]
    return history, dict(model.module.state_dict()), state, Imitation.replays


def assert_same(found: Any, expected: Any) -> None:
    (history, weights, state, _), (without, eager, kept, _) = found, expected
    assert [(r.step, r.epoch, r.rates, list(r.metrics)) for r in history] == [
        (r.step, r.epoch, r.rates, list(r.metrics)) for r in without
    ]
    assert [r.loss for r in history] == pytest.approx([r.loss for r in without], abs=2e-6)
    torch.testing.assert_close(weights, eager, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state, kept, rtol=1e-5, atol=2e-6)


ADAGRAD: Make = lambda some: torch.optim.Adagrad(some, lr=0.05)  # noqa: E731
OPTIMIZERS: dict[str, tuple[Make, bool]] = {
    "Adagrad, sparse": (ADAGRAD, True),
    "SGD, sparse": (lambda some: torch.optim.SGD(some, lr=0.05, maximize=True), True),
    "Adagrad": (lambda some: torch.optim.Adagrad(some, lr=0.05, weight_decay=0.01), False),
    "SGD": (lambda some: torch.optim.SGD(some, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01), False),
    "Adam": (lambda some: torch.optim.Adam(some, lr=0.01, weight_decay=0.01, amsgrad=True), False),
    "AdamW": (lambda some: torch.optim.AdamW(some, lr=0.01), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_steps_learn_the_same_weights(sessions: Sessions, name: str) -> None:
    """Over two epochs and a half, with an uneven last batch, a schedule, records and evaluations between."""
    make, sparse = OPTIMIZERS[name]
    options = {"sparse": sparse, "schedule": warmup_decay(75, warmup=10)}
    expected = sessions[1].run(train, make, False, **options)
    found = sessions[1].run(train, make, True, **options)
    assert expected[-1] == 0 and found[-1] > 20, "the steps were replayed"
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adagrad, sparse", "AdamW"])
def test_gradients_are_clipped(sessions: Sessions, name: str) -> None:
    make, sparse = OPTIMIZERS[name]
    options = {"sparse": sparse, "max_grad_norm": 0.02}
    expected = sessions[1].run(train, make, False, **options)
    found = sessions[1].run(train, make, True, **options)
    plain = sessions[1].run(train, make, False, sparse=sparse)
    assert found[-1] > 20 and found[0][-1].loss != pytest.approx(plain[0][-1].loss, abs=1e-5)
    assert_same(found, expected)


@pytest.mark.slow
def test_a_run_is_resumed(sessions: Sessions, tmp_path: Path) -> None:
    """Snapshots between, broken off while captured; resumed captured, and not."""
    make, options = OPTIMIZERS["Adam"][0], {"schedule": warmup_decay(75, warmup=10)}
    expected = sessions[1].run(train, make, False, **options)
    for captured in (True, False):
        kept = {"snapshots": Snapshots(tmp_path / str(captured), every=10, resume=True), **options}
        with pytest.raises(ZeroDivisionError):
            sessions[1].run(train, make, True, breaks_after=47, **kept)
        assert [path.name for path in kept["snapshots"].all()] == ["step-30", "step-40"]  # type: ignore[attr-defined]
        assert_same(sessions[1].run(train, make, captured, **kept), expected)


@pytest.mark.slow
def test_training_that_cannot_be_captured(sessions: Sessions) -> None:
    """An error with `captured=True`; without it, the run is the usual one."""
    refusals: dict[str, dict[str, Any]] = {
        "draws random numbers on the CPU": {"dropout": 0.5},  # as dropout does here, and does not on a GPU
        "gradient_accumulation_steps= was given": {"gradient_accumulation_steps": 2},
        "not all columns of the loader lie on the GPU": {
            "data": rows() | {"list": Ragged(torch.arange(1000), torch.arange(1001))}
        },
    }
    for why, options in refusals.items():
        with pytest.raises(ValueError, match=f"`captured` must be None or False .* got True: .*{why}"):
            sessions[1].run(train, ADAGRAD, True, **options)
        expected = sessions[1].run(train, ADAGRAD, False, **options)
        found = sessions[1].run(train, ADAGRAD, None, **options)
        assert found[-1] == 0
        assert_same(found, expected)
    optimizers: dict[str, Make] = {
        "the optimizer is RMSprop, not one of torch's SGD, Adagrad, Adam, AdamW": torch.optim.RMSprop,
        "Adagrad has lr_decay=0.1": lambda some: torch.optim.Adagrad(some, lr_decay=0.1),
    }
    for why, make in optimizers.items():
        with pytest.raises(ValueError, match=why):
            sessions[1].run(train, make, True)
    with pytest.raises(ValueError, match="there are 2 ranks"):
        sessions[2].run(train, ADAGRAD, True)


@pytest.mark.slow
def test_a_rank_without_a_gpu_says_so(sessions: Sessions) -> None:
    def asked() -> None:
        model = replicate(nn.Linear(1, 1), ADAGRAD)
        fit(
            model,
            lambda m, b: (m(b[0])[:, 0], b[1]),
            MemoryLoader((torch.rand(9, 1), torch.ones(9)), 3),
            steps=3,
            captured=True,
        )

    with pytest.raises(ValueError, match="this rank has no GPU of its own"):
        sessions[1].run(asked)


def test_rows_are_stepped_as_torch_does() -> None:
    draw = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.randn(40, 6, generator=draw))
    mine, sums = table.detach().clone(), torch.zeros(40, 6)
    optimizer = torch.optim.Adagrad([table], lr=0.1)
    for count in (1, 200, 17):
        ids = (torch.rand(count, generator=draw) ** 3 * 40).long()
        grads = torch.randn(count, 6, generator=draw)
        table.grad = torch.sparse_coo_tensor(ids[None], grads, table.shape, check_invariants=False)
        optimizer.step()
        adagrad_rows(mine, sums, ids, grads, torch.tensor(0.1), 1e-10)
    torch.testing.assert_close(mine, table.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, optimizer.state[table]["sum"], rtol=1e-5, atol=1e-6)

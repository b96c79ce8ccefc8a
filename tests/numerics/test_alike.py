"""`check="ranks"`: what is named of ranks that differ, and what may differ."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist import RankMismatch, Session

RANKS, OPTIONS = 3, {"devices": "cpu", "check": ["nan", "ranks:4"]}


def batches(step: int) -> torch.Tensor:
    """Rows of a step, others on each rank."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(
    model: nn.Module,
    rows: Callable[[int], torch.Tensor] = batches,
    then: Callable[[int], None] = lambda step: None,
    steps: int = 9,
    **options: Any,
) -> int:
    """Train under DDP; `then` is called with the number of each step after it."""
    replicated = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        replicated(rows(step)).square().mean().backward()
        optimizer.step()
        then(step)
    return steps


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def changes_a_weight() -> None:
    model = plain()

    def then(step: int) -> None:
        if step == 5 and dist.get_rank() == 2:
            with torch.no_grad():
                model[2].weight[0, 1] += 1e-3  # type: ignore[index, operator]

    train(model, then=then)


def exchanges_two_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def then(step: int) -> None:
        if step == 1 and dist.get_rank() == 0:
            with torch.no_grad():
                model[0].bias.copy_(model[0].bias.flip(0))  # type: ignore[operator, union-attr]

    train(model, then=then)


def begins_with_other_weights() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, 4):
        model(batches(step)).mean().backward()
        for one in model.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()


def does_not_send_buffers() -> None:
    train(plain(), broadcast_buffers=False)


def gives_all_the_same_rows() -> None:
    train(plain(), rows=lambda step: torch.randn(6, 3, generator=torch.Generator().manual_seed(step)))


def gives_two_the_same_rows() -> None:
    train(plain(), rows=lambda step: torch.randn(6, 3) + (dist.get_rank() == 1))


FAULTS = [
    (changes_a_weight, 8, "2.weight", [2]),
    (exchanges_two_weights, 2, "0.bias", [0]),
    (begins_with_other_weights, 1, "weight", [1, 2]),
    (does_not_send_buffers, 1, "1.running_mean", [1, 2]),
    (gives_all_the_same_rows, 2, "rows", [0, 1, 2]),
    (gives_two_the_same_rows, 2, "rows", [0, 2]),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].__name__)
def test_the_first_difference_is_named(session: Session, fault: tuple[Any, int, str, list[int]]) -> None:
    fn, step, tensor, ranks = fault
    with pytest.raises(RankMismatch) as caught:
        session.run(fn)
    error = caught.value
    assert (error.step, error.tensor, error.ranks) == (step, tensor, ranks), error
    assert f"step {step}, " in str(error) and "What helps: " in str(error)


def test_what_may_differ_ends_nothing(session: Session) -> None:
    """Buffers that rank 0 sends at each step; rows that never change; steps of one rank alone; unused rows."""
    assert session.run(train, plain()) == 9
    assert session.run(train, plain(), lambda step: torch.ones(6, 3)) == 9

    def alone() -> float:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(batches(step)).mean().backward()
            optimizer.step()
        return float(model.weight.detach().sum())

    assert session.run(alone, ranks=[1]) != 0.0


def test_random_states_are_told_of(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    def then(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            random.random()

    session.run(train, nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)), batches, then)
    said = session.logs(0)
    assert said.count("dropout masks are the same on all ranks; seed_ranks=True makes them different") == 1
    assert said.count("after step 4, the random state of random is no longer the same on all ranks: rank 1 drew") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Session(2, devices="cpu", check="ranks", seed_ranks=True) as other:
            other.run(train, nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)), batches)
            assert "nbdist:" not in other.logs(0)
    capfd.readouterr()

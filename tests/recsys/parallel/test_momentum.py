"""SGD with momentum, for tables of all kinds: each row as if torch.optim.SGD trained it alone, in its own steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Sessions
from torch import nn

from nbdist.recsys.models import PooledTables
from nbdist.recsys.raw_ids import RawIds, RawTable
from nbdist.recsys.sharding import replicate, shard

pytestmark = pytest.mark.slow
WARM = "import torchrec.distributed"
ROWS, WIDTH, STEPS = 12, 4, 6
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
}
KINDS = ("row_wise", "column_wise", "shared", "copied", "raw")


def ids(step: int) -> torch.Tensor:
    """The ids of all ranks; some rows are used in every step, some in none, one twice in a step."""
    draw = torch.Generator().manual_seed(step)
    return torch.cat([torch.randperm(ROWS - 2, generator=draw)[:5], torch.tensor([0, 1, 1])])


def loss(vectors: torch.Tensor, some: torch.Tensor, step: int) -> torch.Tensor:
    return (vectors - some[:, None].cos() - step).square().sum()


def made(kind: str, make: Any) -> Any:
    """In a rank: a table of zeros."""
    if kind == "shared":
        return replicate(zeros(nn.Embedding(ROWS, WIDTH, sparse=True)), make)
    if kind == "copied":
        return replicate(zeros(nn.Embedding(ROWS, WIDTH, sparse=True)), make, process_group=dist.group.WORLD)
    if kind == "raw":
        return replicate(RawTable(WIDTH, RawIds(bound=0)), make)
    tables = PooledTables({"id": ROWS}, embedding_dim=4 * WIDTH, init=nn.init.zeros_)
    return shard(tables, {"id": kind}, batch_size=8, optimizer=make)


def zeros(table: nn.Embedding) -> nn.Embedding:
    nn.init.zeros_(table.weight)
    return table


def train(kind: str, make: Any, steps: range, begin: Path | None = None, end: Path | None = None) -> Any:
    """In a rank: the table after some steps."""
    model = made(kind, make)
    if begin is not None:
        model.load(begin)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in steps:
        mine = ids(step).tensor_split(size)[rank]
        model.optimizer.zero_grad()
        vectors = model.model({"id": mine} if kind in ("row_wise", "column_wise") else mine)
        (loss(vectors[:, :WIDTH], mine, step) * size).backward()
        model.optimizer.step()
    if end is not None:
        model.save(end)
    whole = model.gather()
    if whole is None:
        return None
    if kind == "raw":
        return whole(torch.arange(ROWS)).detach()
    (weight,) = whole.parameters()
    return weight.detach()[:, :WIDTH]


def alone(make: Any) -> torch.Tensor:
    """In this process: each row is a parameter of its own, which torch passes over in steps that do not use it."""
    rows = [nn.Parameter(torch.zeros(WIDTH)) for _ in range(ROWS)]
    optimizer = make(rows)
    for step in range(STEPS):
        optimizer.zero_grad()
        some = ids(step)
        loss(torch.stack([rows[i] for i in some]), some, step).backward()
        optimizer.step()
    return torch.stack(list(rows)).detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_move_as_if_each_were_trained_alone(sessions: Sessions, kind: str, optimizer: str) -> None:
    expected = alone(OPTIMIZERS[optimizer])
    assert (expected[-2:] == 0).all() and (expected[:-2] != 0).any(1).sum() > 5
    for nranks in (1, 2):
        found = sessions[nranks].run(train, kind, OPTIMIZERS[optimizer], range(STEPS))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["row_wise", "shared", "copied"])
def test_velocities_are_in_checkpoints(sessions: Sessions, kind: str, tmp_path: Path) -> None:
    make, half = OPTIMIZERS["momentum"], STEPS // 2
    sessions[2].run(train, kind, make, range(half), None, tmp_path)
    found = sessions[1].run(train, kind, make, range(half, STEPS), tmp_path)
    torch.testing.assert_close(found, alone(make), rtol=1e-5, atol=1e-6)
    other = partial(torch.optim.Adagrad, lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer's state in .* does not fit"):
        sessions[1].run(train, kind, other, range(0), tmp_path)


def test_other_steps_with_momentum_are_refused(sessions: Sessions) -> None:
    dampened = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)
    for kind in ("shared", "copied", "raw"):
        with pytest.raises(ValueError, match="`dampening` must be 0 where a table has sparse=True or raw ids"):
            sessions[1].run(made, kind, dampened)
    with pytest.raises(ValueError, match=r"no options but lr, momentum and nesterov .* got dampening=0\.1"):
        sessions[1].run(made, "row_wise", dampened)
    with pytest.raises(ValueError, match=r"copies of a table train with .* only, not with sgd with momentum"):
        sessions[1].run(made, "data_parallel", OPTIMIZERS["momentum"])

    def fused() -> None:
        tables = PooledTables({"id": ROWS}, embedding_dim=WIDTH)
        shard(tables, batch_size=8, optimizer=OPTIMIZERS["momentum"], fused=True)

    with pytest.raises(ValueError, match="`fused` must be None or False where SGD has momentum, got True"):
        sessions[1].run(fused)

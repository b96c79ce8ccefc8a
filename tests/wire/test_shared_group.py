"""A process group through shared memory gives what gloo gives, to torch and to DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import LINUX, poll
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbdist import RankDied, Session
from nbdist.shm import collectives as shared_collectives
from nbdist.shm.process_group import SharedGroup, shared_group

pytestmark = pytest.mark.skipif(not LINUX, reason="only on Linux a rank opens the memory of another")

RANKS = 3


def group() -> SharedGroup:
    found = shared_group()
    assert found is not None
    return found


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(dist.get_rank())
    return (100 * torch.rand(shape, generator=draw)).to(dtype)


def assert_as_gloo(collective: Any) -> None:
    """`collective` is called with a process group and returns what it gives."""
    torch.testing.assert_close(collective(group()), collective(dist.group.WORLD), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pieces", [0.0, 0.001, 2.3])
def test_parts_of_unknown_size_are_exchanged(session: Session, pieces: float) -> None:
    def exchange() -> bool:
        collectives = group().collectives
        rank, size = collectives.rank, collectives.size
        length = int(pieces * shared_collectives._PIECE)
        parts = [np.full(length * (rank + 1) + other, 10 * rank + other, np.uint8) for other in range(size)]
        collectives.barrier()
        received = collectives.all_to_all([None] * size, parts)
        return all(
            len(one) == length * (sender + 1) + rank and (one == 10 * sender + rank).all()
            for sender, one in enumerate(received)
        )

    assert all(session.run_all(exchange))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("pieces", [0.0, 0.001, 1.0, 2.3])
def test_collectives(session: Session, dtype: torch.dtype, pieces: float) -> None:
    size = int(pieces * shared_collectives._PIECE) // dtype.itemsize

    def compare() -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def all_reduce(group: Any, op: Any) -> torch.Tensor:
            tensor = mine(size, dtype=dtype)
            dist.all_reduce(tensor, op, group=group)
            return tensor

        def broadcast(group: Any) -> torch.Tensor:
            tensor = mine(size, dtype=dtype)
            dist.broadcast(tensor, src=1, group=group)
            return tensor

        def all_gather(group: Any) -> list[torch.Tensor]:
            gathered = [torch.empty(size, dtype=dtype) for _ in range(ranks)]
            dist.all_gather(gathered, mine(size, dtype=dtype), group=group)
            return gathered

        def into_tensor(group: Any) -> torch.Tensor:
            gathered = torch.empty(ranks * size, dtype=dtype)
            dist.all_gather_into_tensor(gathered, mine(size, dtype=dtype), group=group)
            return gathered

        def equal_parts(group: Any) -> torch.Tensor:
            received = torch.empty(ranks * size, 2, dtype=dtype)
            dist.all_to_all_single(received, mine(ranks * size, 2, dtype=dtype), group=group)
            return received

        def unequal_parts(group: Any) -> torch.Tensor:  # rank r sends (r + 1) * (s + 2) * size to rank s
            send = [(rank + 1) * (other + 2) * size // 8 for other in range(ranks)]
            receive = [(other + 1) * (rank + 2) * size // 8 for other in range(ranks)]
            received = torch.empty(sum(receive), dtype=dtype)
            work = dist.all_to_all_single(
                received, mine(sum(send), dtype=dtype), receive, send, group=group, async_op=True
            )
            work.wait()
            return received

        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            assert_as_gloo(lambda group, op=op: all_reduce(group, op))
        for collective in (broadcast, all_gather, into_tensor, equal_parts, unequal_parts):
            assert_as_gloo(collective)

    session.run(compare)


def test_operations_that_gloo_lacks(session: Session) -> None:
    """Parts that differ in size over the ranks, scattered and gathered; and a mean."""

    def check() -> None:
        rank, ranks, shared = dist.get_rank(), dist.get_world_size(), group()
        parts = [torch.full((other, 2), float(rank + other)) for other in range(ranks)]
        total = torch.empty(rank, 2)
        dist.reduce_scatter(total, parts, group=shared)
        assert torch.equal(total, torch.full((rank, 2), float(sum(other + rank for other in range(ranks)))))
        gathered = [torch.empty(other, 2) for other in range(ranks)]
        dist.all_gather(gathered, total, group=shared)
        assert [len(one) for one in gathered] == list(range(ranks)) and torch.equal(gathered[rank], total)
        mean = torch.tensor(float(rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=shared)
        assert mean == 1.0
        columns = torch.arange(6.0).view(2, 3).T  # not contiguous
        dist.all_reduce(columns, group=shared)
        assert torch.equal(columns, ranks * torch.arange(6.0).view(2, 3).T)
        with pytest.raises(RuntimeError, match="not supported by collectives in shared memory"):
            dist.all_reduce(mean, dist.ReduceOp.PRODUCT, group=shared)
        dist.barrier(group=shared)

    session.run(check)


def test_ddp_trains_with_the_shared_group(session: Session) -> None:
    def train(shared: bool) -> torch.Tensor:
        torch.manual_seed(dist.get_rank())  # DDP makes the copies one
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        model = DistributedDataParallel(model, process_group=group() if shared else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(mine(16, 4) / 100).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    one, *others = session.run_all(train, True)
    assert all(torch.equal(one, other) for other in others)
    torch.testing.assert_close(one, session.run(train, False))


def test_one_shared_group_for_all_ranks_and_gloo_for_subgroups(session: Session) -> None:
    def check() -> None:
        assert group() is group()
        pair = dist.new_group([0, 1], backend=dist.get_backend(group()))
        if dist.get_rank() < 2:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=pair)
            assert tensor == 2

    session.run(check)


def waits(rank: int, action: Any) -> None:
    shared = group()
    dist.barrier(group=shared)
    if dist.get_rank() == rank:
        action()
    dist.barrier(group=shared)


def raise_it() -> None:
    raise KeyError("one rank")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set no end to the time in which the other ranks leave after the first failure: a call must not use it up."""
    monkeypatch.setattr("nbdist.kernel.calls.ending.GRACE_AFTER_FAILURE", 10_000.0)


def test_a_failure_elsewhere_ends_the_wait(session: Session, patient: None) -> None:
    pids = session.run_all(os.getpid)
    with pytest.raises(KeyError):
        session.run(waits, 1, raise_it)
    assert session.run_all(os.getpid) == pids
    session.run(waits, 1, lambda: None)  # in a new group


def test_a_death_elsewhere_ends_the_wait(patient: None) -> None:
    with Session(2) as session, pytest.raises(RankDied):
        session.run(waits, 1, lambda: os._exit(3))


def test_a_group_after_one_that_was_interrupted() -> None:
    def interrupted() -> None:
        dist.Backend.NBDIST = "nbdist"  # type: ignore[attr-defined]  # the first line of torch's register_backend

    with Session(2) as session:
        session.run(interrupted)
        session.run(waits, 0, lambda: None)


def test_a_group_ends_when_its_ranks_leave_it(session: Session) -> None:
    def open_it() -> None:
        import __main__

        __main__.kept = group()  # as a model keeps it
        dist.barrier()
        raise ZeroDivisionError

    def leave() -> int:
        with pytest.raises(ZeroDivisionError):
            session.run(open_it)  # the next call has another process group
        return sum(session.run_all(lambda: psutil.Process().num_fds()))

    leave()
    before = leave()
    for _ in range(3):
        leave()
    assert poll(lambda: sum(session.run_all(lambda: psutil.Process().num_fds())) <= before)


def test_libraries_find_the_device_of_the_group(session: Session) -> None:
    """TorchRec 1.6 asks by this function, which raises for a group without devices before torch 2.12."""

    def device() -> tuple[str, list[str]]:
        return str(dist.distributed_c10d._get_pg_default_device(group())), list(map(str, group()._device_types))

    assert session.run_all(device) == [("cpu", ["cpu"])] * session.nranks

"""Collectives in torch's flight recorder, as ranks send them and the kernel reads them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import poll
from torch.nn.parallel import DistributedDataParallel

from nbdist import Session
from nbdist.kernel.calls import flights
from nbdist.kernel.session import executor_of
from nbdist.wire.recording import Collective

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="this torch records nothing without NCCL"
)


def read(session: Session) -> list[list[Collective]]:
    group = executor_of(session).group
    assert group is not None
    group.ranks.read_flight_recorders([0, 1])
    found: list[list[Collective] | None] = []

    def answered() -> bool:
        found[:] = [flights.parse(text, 2) for text in group.ranks.stacks([0, 1]).values()]
        return None not in found

    assert poll(answered)
    return [one for one in found if one is not None]


def step() -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    dist.barrier()


def test_collectives_that_cpp_calls_are_read(session: Session) -> None:
    session.run(step)
    for own in read(session):
        assert [one.what() for one in own[-3:-1]] == ["broadcast of 4 float32", "all_reduce of 4 float32"]
        assert own[-1].kind == "barrier"
    # torch records the end of a collective in a thread of its own, after the call has returned
    assert poll(lambda: not any(one.waits for own in read(session) for one in own))


def test_only_the_current_group_is_read(session: Session) -> None:
    def fails() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        session.run(fails)
    session.run(lambda: dist.all_reduce(torch.ones(3)))
    assert [[(one.place_in_group, one.what()) for one in own] for own in read(session)] == [
        [(1, "all_reduce of 3 float32")]
    ] * 2


def test_an_answer_without_a_flight_recorder() -> None:
    assert flights.parse('  File "a.py", line 1 in f\n', 2) is None

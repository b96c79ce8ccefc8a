"""The process group of a rank as a function starts and ends it that was written for torchrun."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group

from nbdist import Session, in_ddp


def total() -> float:
    ones = torch.ones(())
    dist.all_reduce(ones)
    return ones.item()


def as_a_script() -> tuple[float, bool]:
    init_process_group("gloo", init_method="env://", world_size=int(os.environ["WORLD_SIZE"]))
    found = total()
    destroy_process_group()
    dist.init_process_group()  # once more, by another name
    assert total() == found
    return found, dist.is_initialized()


def test_the_group_that_is_up_is_started_and_ended_by_a_function(session: Session) -> None:
    group = session.run_all(lambda: id(dist.group.WORLD))
    for _ in range(2):
        assert session.run_all(as_a_script) == [(2.0, True)] * 2
    assert session.run_all(lambda: id(dist.group.WORLD)) == group, "the next call finds the same"


def test_init_process_group_in_a_rank_prints_one_notice(capfd: pytest.CaptureFixture[str]) -> None:
    in_ddp(2, as_a_script)
    assert capfd.readouterr().err.count("the process group is up already, so init_process_group does nothing") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"backend": "nccl"}, "`backend` must be 'gloo', got 'nccl'"),
        ({"backend": "gloo", "world_size": 4, "rank": 0}, "`world_size` must be 2, got 4"),
    ],
)
def test_init_process_group_with_other_arguments_is_refused(
    session: Session, wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=f"is up already: {said}. Leave init_process_group out"):
        session.run(lambda: init_process_group(**wrong))  # type: ignore[arg-type]
    assert session.run(total) == 2.0


def of_its_own(started: bool) -> int:
    if started:
        init_process_group()
    destroy_process_group()
    init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    return dist.get_world_size()


@pytest.mark.parametrize("started", [True, False])
def test_a_group_that_a_function_leaves_is_not_that_of_the_next_call(session: Session, started: bool) -> None:
    assert session.run_all(of_its_own, started) == [1, 1]
    assert session.run_all(total) == [2.0, 2.0]


def test_destroy_process_group_ends_the_functions_own_groups(session: Session) -> None:
    def groups() -> tuple[int, int]:
        init_process_group()
        dist.new_group([0, 1])
        before = len(dist.distributed_c10d._world.pg_map)
        dist.barrier()  # a rank that destroys its group while another one still connects breaks that connection
        destroy_process_group()
        return before, len(dist.distributed_c10d._world.pg_map)

    assert session.run_all(groups) == [(2, 1)] * 2


def test_ranks_seem_to_be_launched_by_torchrun(session: Session) -> None:
    assert session.run(dist.is_torchelastic_launched) and session.run(lambda: not hasattr(sys, "ps1"))

"""`warm(gpus=True)`: ranks that wait with the contexts of their GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from conftest import poll

from nbdist import Session, in_ddp, warm
from nbdist.engines import warm_ranks
from nbdist.system.gpus import look


def users() -> set[int]:
    """The processes with a context on both GPUs together, without this one."""
    found: set[int] = set()
    for gpu in "01":
        use = look(gpu)
        assert use is not None
        found |= use.processes.keys()
    return found - {os.getpid()}


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    warm_ranks.stop()
    assert poll(lambda: not users())


def who() -> tuple[Any, ...]:
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.current_device(), torch.cuda.device_count()


def test_a_launch_takes_the_ranks_that_wait_and_others_wait_after_it() -> None:
    warm("import torch", gpus=True)
    seen = set()
    for _ in range(3):
        assert poll(lambda: len(users()) == 2)
        waiting = users()
        with Session(2, backend="gloo") as session:
            found = session.run_all(who)
        assert [one[1:] for one in found] == [("0,1", 0, 2), ("0,1", 1, 2)]
        assert {one[0] for one in found} == waiting
        seen |= waiting
    assert len(seen) == 6, "each launch has fresh processes"


def test_a_rank_for_some_gpus_and_launches_of_another_size() -> None:
    warm(gpus=1)
    assert poll(lambda: len(users()) == 1)
    [waiting] = users()
    with Session(2, backend="gloo") as session:
        assert waiting not in {one[0] for one in session.run_all(who)}
    assert in_ddp.options(devices=["cuda:1"])(1, who)[1:] == ("1", 0, 1)
    assert in_ddp.options(devices="cpu")(1, os.getpid) != waiting
    assert in_ddp(1, who) == (waiting, "0", 0, 1)


def test_ranks_that_have_become_other_ones_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**options: Any) -> bool:
        assert poll(lambda: len(users()) == 1)
        [waiting] = users()
        return bool(in_ddp.options(**options)(1, os.getpid) == waiting)

    warm(gpus=1)
    assert taken()
    assert not taken(env={"CUDA_LAUNCH_BLOCKING": "1"}) and taken(), "CUDA has read its variables"
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not taken() and taken()
    assert not taken(env={"TORCH_LOGS": "-dynamo"}) and taken(), "such ranks have a fork server of their own"
    assert poll(lambda: len(users()) == 1)
    [waiting] = users()
    os.kill(waiting, 9)
    assert poll(lambda: not psutil.pid_exists(waiting)), "its memory is free before it has ended"
    assert in_ddp(1, who)[1:] == ("0", 0, 1)


def test_the_ranks_end_after_a_time_without_use() -> None:
    warm(gpus=True, idle=0.5)
    assert poll(lambda: len(users()) == 2)
    assert poll(lambda: not users())


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"gpus must be at most 2, got 3: 2 GPUs are visible"):
        warm(gpus=3)

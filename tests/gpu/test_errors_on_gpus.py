"""Errors of CUDA in ranks, and what calls leave on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from imitated.computing import Computing, raise_on_gpu

from nbdist import Session, in_ddp

RANKS = 1
OPTIONS = {"devices": "cuda"}


def touch() -> float:
    with Computing():
        return float(torch.ones(2, device="cuda").sum().item())


def meet(error: int, wait: bool) -> None:
    """In a rank: a kernel meets an error of CUDA's."""
    torch.ones(1).cuda()
    raise_on_gpu(error, "")
    if wait:
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (700, "an illegal memory access was encountered"),
        (710, "device-side assert triggered"),
        (214, "uncorrectable ECC error encountered"),
        (719, "unspecified launch failure"),
        (721, "error of the imitated GPU"),
    ],
)
def test_after_an_error_that_stays_the_next_call_has_a_fresh_rank(session: Session, error: int, text: str) -> None:
    pid = session.run(os.getpid)
    with pytest.raises(RuntimeError, match=f"CUDA error: {text}"):
        session.run(meet, error, True)
    assert session.run(touch) == 2.0 and session.run(os.getpid) != pid


def test_an_error_that_nothing_in_the_call_waits_for_is_raised_in_it(session: Session) -> None:
    session.run(touch)
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        session.run(meet, 710, False)
    assert session.run(touch) == 2.0


def test_an_error_of_another_type_does_not_hide_that_the_gpu_is_lost(session: Session) -> None:
    def hidden() -> None:
        try:
            meet(700, True)
        except RuntimeError:
            raise KeyError("mine") from None

    pid = session.run(os.getpid)
    with pytest.raises(KeyError, match="mine"):
        session.run(hidden)
    assert session.run(touch) == 2.0 and session.run(os.getpid) != pid


def test_an_error_that_leaves_the_gpu_keeps_the_rank(session: Session) -> None:
    def refused() -> None:
        with Computing():
            torch.ones(2, device="cuda") + torch.ones(2)

    session.run(touch)
    pid = session.run(os.getpid)
    with pytest.raises(RuntimeError, match="same device"):
        session.run(refused)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        session.run(lambda: torch.ones(1).to("cuda:1"))  # a session sees its own GPUs
    assert session.run(os.getpid) == pid


# ------------------------------------------------------------------------------------------------------------- memory


def circle() -> None:
    """In a rank: leave 1 GiB in a circle of references, as learners are."""
    kept: list[Any] = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda")]
    kept.append(kept)


def test_circles_of_references_are_gone_after_a_call(session: Session) -> None:
    for _ in range(3):
        session.run(circle)
    assert session.run(torch.cuda.memory_allocated) < 1 << 20


def test_a_rank_goes_on_where_a_call_after_the_other_fills_the_gpu(session: Session) -> None:
    for _ in range(20):
        session.run(circle)  # of 16 GiB
    assert session.run(touch) == 2.0


def test_an_idle_session_gives_its_cache_back(session: Session) -> None:
    session.run(circle)
    free = torch.cuda.mem_get_info(0)[0]
    session.empty_cache()
    assert torch.cuda.mem_get_info(0)[0] - free >= 1 << 30


def test_calls_leave_the_gpus_memory_as_it_was() -> None:
    in_ddp.options(devices=["cuda:1"])(1, touch)
    before = torch.cuda.mem_get_info(1)[0]
    for _ in range(5):
        in_ddp.options(devices=["cuda:1"])(1, circle)
    assert torch.cuda.mem_get_info(1)[0] == before


def test_the_memory_of_a_rank_that_is_killed_is_free_again() -> None:
    def die() -> None:
        circle()
        os.kill(os.getpid(), 9)

    torch.cuda.mem_get_info(1)
    before = torch.cuda.mem_get_info(1)[0]
    with pytest.raises(Exception, match="SIGKILL"):
        in_ddp.options(devices=["cuda:1"])(1, die)
    assert torch.cuda.mem_get_info(1)[0] == before


def test_status_says_what_each_gpu_has_in_use(session: Session) -> None:
    session.run(touch)
    assert "of 16.0 GiB" in str(session.status())

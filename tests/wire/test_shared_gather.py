"""Arrays that ranks lay out in memory that they share: each finds there what the others have given."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import torch.distributed as dist
from conftest import LINUX, Sessions
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import Session
from nbdist.shm.collectives import open_shared_collectives
from nbdist.shm.gather import SharedGather

pytestmark = pytest.mark.skipif(not LINUX, reason="only on Linux a rank opens the memory of another")

RANKS = 3
KINDS = ((np.int64, ()), (np.uint8, (5,)), (np.float32, (2, 3)))


def arrays(rank: int, number: int, lengths: list[int]) -> list[np.ndarray]:
    draw = np.random.default_rng([rank, number])
    return [
        draw.integers(0, 200, (length, *shape)).astype(kind)
        for (kind, shape), length in zip(KINDS, lengths, strict=True)
    ]


def exchange(rounds: list[list[list[int]]]) -> None:
    """In a rank: all rounds, each with the lengths of every rank's arrays."""
    shared = open_shared_collectives()
    assert shared is not None
    gather = SharedGather(shared, 3)
    for number, of_ranks in enumerate(rounds):
        found = gather(arrays(dist.get_rank(), number, of_ranks[dist.get_rank()]))
        for rank, (theirs, lengths) in enumerate(zip(found, of_ranks, strict=True)):
            for one, wanted in zip(theirs, arrays(rank, number, lengths), strict=True):
                np.testing.assert_array_equal(one, wanted)
                assert one.dtype == wanted.dtype
    shared.close()


LENGTHS = st.lists(st.integers(0, 20) | st.just(3000), min_size=3, max_size=3)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(LENGTHS, min_size=RANKS, max_size=RANKS), min_size=1, max_size=8))
def test_each_rank_finds_what_all_have_given(sessions: Sessions, rounds: list[list[list[int]]]) -> None:
    sessions[RANKS].run(exchange, rounds)


def test_gathered_values_stay_until_the_next_call(session: Session) -> None:
    """Though other ranks are in the next one already."""

    def hold() -> None:
        shared = open_shared_collectives()
        assert shared is not None
        gather = SharedGather(shared, 1)
        for number in range(300):
            found = gather([np.full(50, number)])
            if number % RANKS == dist.get_rank() and number % 10 == 0:
                time.sleep(0.01)  # the others go on
            assert all((one == number).all() for (one,) in found)
        shared.close()

    session.run(hold)


def test_a_rank_that_has_failed_alone_is_in_step_again(session: Session) -> None:
    """The rank is like one that was interrupted before it met the others."""

    def fail() -> None:
        shared = open_shared_collectives()
        assert shared is not None
        gather = SharedGather(shared, 1)
        for number in range(4):
            if dist.get_rank() == number:
                with contextlib.suppress(ValueError):
                    gather([np.zeros(3), np.zeros(3)])
            found = gather([np.full(3, 10 * number + dist.get_rank())])
            assert [one.tolist() for (one,) in found] == [[10 * number + rank] * 3 for rank in range(RANKS)]
        shared.close()

    session.run(fail)

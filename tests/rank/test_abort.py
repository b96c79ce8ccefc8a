"""Ranks that wait where no signal reaches them are released: by what aborts their own process groups."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import time

import pytest
import torch.distributed as dist
from calls import boom, on, sums
from clocks import CallClock

from nbdist import NbdistError, Session, in_ddp
from nbdist.rank.world import Membership
from nbdist.wire import stacks


class HeldGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Waits as NCCL's do: handles no signal, does not notice that others leave, and ends by `abort` alone."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.libc, self.mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        self.libc.pthread_mutex_lock(self.mutex)

    def wait(self) -> None:
        self.libc.pthread_mutex_lock(self.mutex)

    def abort(self) -> None:
        self.libc.pthread_mutex_unlock(self.mutex)


def wait_in_group_of_its_own() -> None:
    held = HeldGroup(dist.get_rank(), dist.get_world_size())
    dist.distributed_c10d._world.pg_names[held] = "held"  # a further group, as FSDP and DeviceMesh make them
    print("waits", flush=True)
    held.wait()


@pytest.mark.parametrize("how", ["failure", "timeout"])
def test_ranks_that_ignore_signals_abort_all_their_groups(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What they get to leave has no end itself: the call must not use it up.
    monkeypatch.setattr("nbdist.kernel.calls.ending.GRACE_AFTER_FAILURE", 10_000.0)
    with Session(2, timeout=1000) as session:
        pids = session.run_all(os.getpid)
        if how == "failure":

            def fail_late() -> None:
                time.sleep(1)
                boom()

            with pytest.raises(ValueError, match="boom"):
                session.run(on, 1, fail_late, wait_in_group_of_its_own)
        else:
            both_wait = CallClock(lambda: session.stacks().count(" is in wait at ") == 2)
            with both_wait, pytest.raises(TimeoutError, match="not done after 1000 s"):
                session.run(wait_in_group_of_its_own)
        assert session.run(sums) == 2.0 and session.run_all(os.getpid) == pids, "its state is kept"


def hears_orders_late() -> None:
    read = stacks.read

    def late(fd: int, size: int) -> bytes:
        time.sleep(0.2)  # as on a machine with more to do than cores
        return read(fd, size)

    stacks.read = late


def work_for_a_second() -> float:
    for _ in range(50):
        time.sleep(0.02)
        total = sums()
    return total


def test_a_late_request_does_not_abort_the_next_call() -> None:
    with Session(2) as session:
        session.run_all(hears_orders_late)
        for _ in range(2):
            with pytest.raises(ValueError, match="boom"):
                session.run(on, 1, boom, sums)
            assert session.run(on, 1, work_for_a_second, work_for_a_second) == 2.0


def cannot_leave() -> None:
    from nbdist.rank import world

    world.PATIENCE_TO_LEAVE = 0.3
    dist.destroy_process_group = lambda *args: time.sleep(1000)
    boom()


def test_a_group_that_cannot_be_left_costs_the_ranks_and_not_the_session() -> None:
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with pytest.raises(ValueError, match="boom"):
            session.run(on, 1, cannot_leave)
        with pytest.raises(NbdistError, match=r"rank 1 could not leave its process group within 0\.3 s"):
            session.run(sums)
        assert session.run(sums) == 2.0 and not set(session.run_all(os.getpid)) & set(pids)
    assert in_ddp(2, sums) == 2.0


class NeverEnds:
    """A group like gloo's, where gloo has missed that the other side of a transfer is gone."""

    def __del__(self) -> None:
        time.sleep(1000)


def group_that_never_ends(kept_by: str) -> None:
    held = NeverEnds()
    if kept_by == "the rank":
        membership = next(found for found in gc.get_objects() if type(found) is Membership)
        membership.kept = membership.kept, held
        del held  # not by the frame
    boom()


@pytest.mark.parametrize("kept_by", ["the rank", "a frame"])
def test_a_group_that_never_ends_is_left_to_itself(kept_by: str) -> None:
    with Session(2, hold_on_error=kept_by == "a frame") as session:
        pids = session.run_all(os.getpid)
        with pytest.raises(ValueError, match="boom"):
            session.run(on, 1, functools.partial(group_that_never_ends, kept_by))
        assert session.run(sums) == 2.0 and session.run_all(os.getpid) == pids, "its state is kept"

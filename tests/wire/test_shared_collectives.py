"""Collectives through shared memory give what torch's own give, and end when these would."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import LINUX, poll

from nbdist import RankDied, Session
from nbdist.kernel.calls import ending, notices
from nbdist.shm import collectives as shared_collectives
from nbdist.shm.collectives import SharedCollectives, open_shared_collectives

pytestmark = pytest.mark.skipif(not LINUX, reason="only on Linux a rank opens the memory of another")

RANKS = 3


def opened() -> SharedCollectives:
    shared = open_shared_collectives()
    assert shared is not None and shared.usable
    return shared


def compare(sizes: list[int], dtype: torch.dtype) -> None:
    shared = opened()
    for size in sizes:
        mine = torch.randn(size, generator=torch.Generator().manual_seed(size + dist.get_rank())).to(dtype)
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        assert all(map(torch.equal, shared.gather(mine), theirs))
        mean = shared.mean_(mine.clone())
        torch.testing.assert_close(mean, torch.stack(theirs).double().mean(0).to(dtype))
        means = [torch.empty_like(mean) for _ in theirs]
        dist.all_gather(means, mean)
        assert all(torch.equal(mean, other) for other in means)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_shared_collectives_match_torch(session: Session, dtype: torch.dtype) -> None:
    piece = shared_collectives._PIECE // dtype.itemsize
    session.run(compare, [1, 7, 1000, piece - 1, piece, piece + 1, 3 * piece + 5, 0], dtype)


def test_small_tensors_share_a_turn(session: Session) -> None:
    """A loss with its gradients; there may be more than fits at once."""

    def together() -> None:
        shared, rank, mean = opened(), dist.get_rank(), (dist.get_world_size() - 1) / 2
        piece = shared_collectives._PIECE // 4
        for size in (0, 3, piece - 16, piece - 15, piece, 2 * piece + 1):
            exchanged = shared.turns
            gradients, loss = torch.full((size,), 1.0 * rank), torch.tensor(4.0 * rank, dtype=torch.float64)
            more = torch.full((2, 1), 6.0 * rank)
            assert shared.mean_(gradients, loss, more) is gradients
            assert (gradients == mean).all() and loss == 4 * mean and more.tolist() == [[6 * mean]] * 2
            assert shared.turns - exchanged == max(1, -(-size // (piece - 32))), "none is waited for by itself"

    session.run_all(together)


def test_large_tensors_share_turns(session: Session) -> None:
    def together() -> None:
        shared, rank = opened(), dist.get_rank()
        piece = shared_collectives._PIECE // 4
        for sizes in ([piece // 2] * 5, [piece + 16, 0, piece - 16], [0, 0], [3 * piece // 2, 1, piece, 7]):
            exchanged = shared.turns
            several = [torch.arange(size, dtype=torch.float64).float() + rank for size in sizes]
            assert shared.mean_(*several) is several[0]
            for size, one in zip(sizes, several, strict=True):
                assert torch.equal(one, torch.arange(size, dtype=torch.float64).float() + 1)
            assert shared.turns - exchanged == max(1, -(-sum(-(-size // 16) * 16 for size in sizes) // piece))

    session.run_all(together)


def test_shapes_and_other_types(session: Session) -> None:
    def gathers() -> None:
        shared = opened()
        for mine in (torch.tensor(dist.get_rank()), torch.full((2, 3), dist.get_rank()).T, torch.tensor([True, False])):
            for rank, theirs in enumerate(shared.gather(mine)):
                assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
                assert mine.dtype == torch.bool or (theirs == rank).all()

    session.run(gathers)


def test_ranks_that_come_late_are_waited_for(session: Session) -> None:
    def uneven() -> list[float]:
        shared, seen = opened(), []
        for turn in range(30):
            time.sleep(0.01 if turn % dist.get_world_size() == dist.get_rank() else 0.0)
            seen.append(shared.mean_(torch.full((4,), float(turn + dist.get_rank())))[2].item())
        return seen

    assert session.run_all(uneven) == [[turn + 1.0 for turn in range(30)]] * 3


@pytest.mark.parametrize("slow", [0, 2])
def test_a_long_call_names_the_slow_rank(
    slow: int, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def uneven(begun: float) -> None:
        shared = opened()
        for rest in (max(0.6, 3 * (time.time() - begun)), 0.6, 0.6):  # most of the call, however long it takes
            if dist.get_rank() == slow:
                time.sleep(rest)
            shared.mean_(torch.ones(1))

    monkeypatch.setattr(notices, "LONG_CALL", 1e6)
    session.run(uneven, time.time())
    assert "waited" not in capsys.readouterr().err, "it was over soon"
    monkeypatch.setattr(notices, "LONG_CALL", 1.0)
    session.run(uneven, time.time())
    pattern = r"rank (\d) waited (\d+) % of the time for other ranks, rank (\d) (\d+) %: rank \3 is the slowest"
    found = re.search(pattern, capsys.readouterr().err)
    assert found is not None and int(found[3]) == slow != int(found[1])
    assert int(found[2]) > 50 > int(found[4])
    session.run(time.sleep, 1.1)
    assert "waited" not in capsys.readouterr().err


def test_a_long_call_blames_none_where_all_waited_alike(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_after_the_other(begun: float) -> None:
        shared = opened()
        rest = max(0.3, time.time() - begun)  # most of the call, however long it takes
        for turn in range(6):
            if dist.get_rank() == turn % dist.get_world_size():
                time.sleep(rest)
            shared.mean_(torch.ones(1))

    monkeypatch.setattr(notices, "LONG_CALL", 1.0)
    session.run(one_after_the_other, time.time())
    assert ": no rank is slower than the others. session.profile" in capsys.readouterr().err


def test_shared_collectives_end_with_their_process_group(session: Session) -> None:
    def keeps() -> None:
        import __main__

        __main__.kept = opened()

    def uses() -> tuple[bool, str]:
        import __main__

        kept: Any = __main__.kept
        try:
            kept.mean_(torch.ones(1))
        except RuntimeError as exc:
            return kept.usable, str(exc)
        raise AssertionError("it worked")

    session.run(keeps)
    with pytest.raises(ZeroDivisionError):
        session.run(lambda: 1 / 0)  # the next call has another group
    usable, text = session.run(uses)
    assert not usable and "process group has ended" in text


def waits(rank: int, action: Any) -> None:
    shared = opened()
    shared.mean_(torch.ones(1))
    if dist.get_rank() == rank:
        action()
    shared.mean_(torch.ones(1))


def raise_it() -> None:
    raise KeyError("one rank")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set no end to the time in which the other ranks leave after the first failure: a call must not use it up."""
    monkeypatch.setattr(ending, "GRACE_AFTER_FAILURE", 10_000.0)


def test_a_failure_elsewhere_ends_the_wait(session: Session, patient: None) -> None:
    pids = session.run_all(os.getpid)
    with pytest.raises(KeyError):
        session.run(waits, 1, raise_it)
    assert session.run_all(os.getpid) == pids


@pytest.mark.parametrize("action", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(3)])
def test_a_death_elsewhere_ends_the_wait(patient: None, action: Any) -> None:
    with Session(2) as session, pytest.raises(RankDied):
        session.run(waits, 1, action)


def test_sizes_that_differ_are_an_error_everywhere(session: Session) -> None:
    def uneven() -> str:
        shared = opened()
        try:
            shared.gather(torch.ones(3 + dist.get_rank() % 2))
        except RuntimeError as exc:
            return str(exc)
        return "it worked"

    assert all("differ in size" in text for text in session.run_all(uneven))


def test_shared_collectives_leave_no_descriptors(session: Session) -> None:
    def open_and_close() -> None:
        opened().mean_(torch.ones(10))

    def descriptors() -> int:
        return psutil.Process().num_fds()

    session.run(open_and_close)
    before = session.run_all(descriptors)
    session.run(lambda: [open_and_close() for _ in range(5)] and None)
    assert poll(lambda: session.run_all(descriptors) == before)


@pytest.mark.parametrize("what", ["another machine", "no permission", "another process"])
def test_all_ranks_raise_where_memory_cannot_be_shared(session: Session, what: str) -> None:
    """All ranks say so, also those that could."""

    def tries() -> bool:
        module: Any = shared_collectives
        if dist.get_rank() == 1:
            with pytest.MonkeyPatch.context() as patch:
                original = module.open_offered

                def fails(offer: Any, file: Any, flags: int, machine: str) -> int:
                    if what == "another machine":
                        offer = offer._replace(machine="elsewhere")
                    elif what == "another process":
                        offer = offer._replace(pid=os.getpid())
                    else:
                        raise PermissionError
                    return int(original(offer, file, flags, machine))

                patch.setattr(module, "open_offered", fails)
                return open_shared_collectives() is None
        return open_shared_collectives() is None

    fds = session.run_all(lambda: psutil.Process().num_fds())
    assert session.run_all(tries) == [True] * 3
    assert session.run_all(lambda: psutil.Process().num_fds()) == fds

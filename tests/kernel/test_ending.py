"""Decisions after a failure, an interrupt or a timeout: as values, without ranks, by a clock that the test sets."""

from __future__ import annotations

import pytest

from nbdist.errors import RankDied, RemoteTraceback
from nbdist.kernel.calls import ending
from nbdist.kernel.calls.ending import Decision, Ending


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    monkeypatch.setattr(ending, "load_per_core", lambda: 0.5)
    return clock


def begin(timeout: float | None = None, on_gpu: bool = False, patience: float = 0.0) -> Ending:
    return Ending(timeout=timeout, on_gpu=on_gpu, patience=patience)


def raised(error: Exception, text: str) -> Exception:
    error.__cause__ = RemoteTraceback(1, 1, text, [text])
    return error


def test_a_call_without_a_timeout_has_nothing_to_decide(clock: Clock) -> None:
    call = begin()
    clock.now += 1e6
    assert call.left(1.0) == 1.0 and call.decide() is Decision.GO_ON and call.elapsed() == 1e6


def test_a_timeout_is_not_over_while_the_user_types(clock: Clock) -> None:
    call = begin(timeout=10.0)
    with call.paused():
        clock.now += 50.0
    assert call.left(100.0) == 10.0 and call.decide() is Decision.GO_ON
    clock.now += 10.0
    assert call.decide() is Decision.TIME_OUT and not call.given_up


@pytest.mark.parametrize(("on_gpu", "seconds"), [(False, 0.8), (True, 5.0)])
def test_ranks_with_a_gpu_get_longer_to_leave(clock: Clock, on_gpu: bool, seconds: float) -> None:
    """Their queue must run empty first."""
    call = begin(on_gpu=on_gpu)
    assert call.fail(1, ValueError()) is Decision.ASK_TO_LEAVE and call.leaving and call.at_once
    call.aborted = True
    call.was_aborted(all_begun=True)
    call.asked_to_leave(all_begun=True)
    assert call.left(100.0) == pytest.approx(seconds)
    clock.now += seconds + 0.1
    assert call.decide() is Decision.GIVE_UP and call.given_up


@pytest.mark.parametrize(("load", "seconds"), [(1.0, 0.8), (4.0, 3.2), (400.0, 15.0)])
def test_ranks_get_longer_on_a_busy_machine(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, load: float, seconds: float
) -> None:
    monkeypatch.setattr(ending, "load_per_core", lambda: load)
    call = begin()
    call.fail(1, ValueError())
    call.aborted = True
    call.was_aborted(all_begun=True)
    assert call.left(100.0) == pytest.approx(seconds)


def test_a_second_failure_asks_nobody_again() -> None:
    call = begin()
    call.fail(1, ValueError("the first"))
    assert call.fail(0, ValueError("the second")) is Decision.GO_ON
    assert [failure.asked for failure in call.failures] == [False, True]


def test_after_an_interrupt_waits_are_broken_off_later(clock: Clock) -> None:
    call = begin()
    assert call.interrupt() is Decision.ASK_TO_LEAVE and not call.at_once
    call.asked_to_leave(all_begun=True)
    assert call.decide() is Decision.GO_ON
    clock.now += ending.GRACE_BEFORE_ABORT
    assert call.decide() is Decision.ABORT
    call.aborted = True
    call.was_aborted(all_begun=True)
    clock.now += ending.GRACE_AFTER_INTERRUPT
    assert call.decide() is Decision.GIVE_UP


def test_a_rank_that_has_not_begun_gets_time_to_begin_and_to_leave(clock: Clock) -> None:
    call = begin()
    call.fail(1, ValueError())
    call.aborted = True
    call.was_aborted(all_begun=False)
    assert call.left(100.0) == pytest.approx(ending.GRACE_TO_BEGIN)
    clock.now += ending.GRACE_TO_BEGIN - 0.1
    call.begun(all_begun=True)
    assert call.left(100.0) == pytest.approx(ending.GRACE_AFTER_FAILURE)


def test_after_an_interrupt_the_wait_for_ranks_to_begin_ends_when_they_have(clock: Clock) -> None:
    """A rank of a cluster begins before the kernel knows of it, and may wait for another rank by then."""
    call = begin()
    call.interrupt()
    call.asked_to_leave(all_begun=False)
    call.begun(all_begun=False)
    assert call.left(100.0) == pytest.approx(ending.GRACE_TO_BEGIN)
    call.begun(all_begun=True)
    assert call.left(100.0) == pytest.approx(ending.GRACE_BEFORE_ABORT)
    clock.now += ending.GRACE_BEFORE_ABORT
    assert call.decide() is Decision.ABORT
    call.aborted = True
    call.was_aborted(all_begun=True)
    assert call.left(100.0) == pytest.approx(ending.GRACE_AFTER_INTERRUPT)


def test_ranks_are_waited_for_once_until_they_have_begun(clock: Clock) -> None:
    call = begin()
    call.fail(1, ValueError())
    call.asked_to_leave(all_begun=False)
    assert call.decide() is Decision.GO_ON and call.left(100.0) == pytest.approx(ending.GRACE_TO_BEGIN)
    clock.now += ending.GRACE_TO_BEGIN
    assert call.decide() is Decision.ABORT
    call.aborted = True
    call.was_aborted(all_begun=False)
    assert call.left(100.0) == pytest.approx(ending.GRACE_AFTER_FAILURE)


def test_a_rank_that_writes_its_error_gets_time_for_it(clock: Clock) -> None:
    call = begin(timeout=1.0)
    call.reporting()
    assert call.left(100.0) == pytest.approx(1.0)  # the timeout of a call that goes well is its own
    call.fail(1, ValueError())
    call.aborted = True
    call.was_aborted(all_begun=True)
    call.reporting()
    assert call.left(100.0) == pytest.approx(ending.GRACE_TO_REPORT)


def test_the_loss_of_a_rank_is_waited_for_once_where_an_engine_reports_it_late(clock: Clock) -> None:
    call = begin(patience=30.0)
    call.fail(1, RuntimeError("Connection closed by peer"))
    call.aborted = True
    call.was_aborted(all_begun=True)
    clock.now += 1.0
    assert call.decide() is Decision.GO_ON and call.left(100.0) == pytest.approx(30.0)
    clock.now += 31.0
    assert call.decide() is Decision.GIVE_UP


def test_the_cause_is_the_failure_that_follows_from_no_other() -> None:
    call = begin()
    call.fail(0, RuntimeError("Connection reset by peer"))
    call.fail(1, ValueError("boom"))
    call.fail(2, raised(KeyError("k"), "KeyboardInterrupt\n\nDuring handling ...\n\nKeyError: 'k'"))
    assert call.cause().rank == 1


def test_the_cause_names_the_others_that_failed_by_themselves() -> None:
    call = begin()
    call.fail(1, raised(ValueError("boom"), "ValueError: boom"))
    call.fail(2, TypeError("another\nline"))
    call.fail(0, KeyboardInterrupt())
    cause = call.cause()
    assert cause.rank == 1 and isinstance(cause.error.__cause__, RemoteTraceback)
    assert cause.error.__cause__.others == ["also failed: rank 2: TypeError: another"]


def test_a_death_is_the_cause_of_lost_connections() -> None:
    call = begin()
    call.fail(0, ConnectionResetError("Connection reset by peer"))
    call.fail(1, RankDied(1, 1, -9, "", ""))
    assert call.cause().rank == 1

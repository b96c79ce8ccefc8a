"""Decisions about a call after a failure, an interrupt or the timeout.

This module sends nothing: `Waiting` reports the events to it, and carries out its decisions.
"""

from __future__ import annotations

import contextlib
import enum
import re
import time
from collections.abc import Iterator

from ...errors import RemoteTraceback, text_of
from ...system.cores import load_per_core

#: Seconds that the other ranks get to end the call after the first failure: enough to send their own errors.
GRACE_AFTER_FAILURE = 0.8
#: The same for ranks with a GPU: a wait of theirs ends when the GPU has finished all work that was queued before.
GRACE_WITH_GPU = 5.0
#: Seconds that a rank gets to begin the call, which it must do to leave it: on a busy machine it may still be joining.
GRACE_TO_BEGIN = 5.0
#: Seconds that a rank gets to send its exception: rendering a traceback with source lines takes time. A rank gets the
#: same time again whenever it reports an uninterruptible step, such as an import.
GRACE_TO_REPORT = 5.0
#: Seconds that ranks get to clean up after an interrupt of the cell.
GRACE_AFTER_INTERRUPT = 5.0
#: Seconds from an interrupt to the abort of the ranks' process groups, unless a rank has left its group before.
GRACE_BEFORE_ABORT = 2.0

#: On a busy machine ranks need more seconds than the above, in proportion to the load, but get no more than these.
MOST_GRACE = 15.0

#: The error of a rank that has lost its peer: a consequence of a failure, not its cause.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by peer|socket closed"
    r"|ncclRemoteError|remote process exit|NCCL communicator was aborted",
    re.I,
)
#: The line of a traceback with the first exception of a rank that has lost its peer or was asked to leave.
_FOLLOWS = re.compile(
    rf"^(KeyboardInterrupt|[\w.]*(?:Error|Exception): .*({_LOST_PEER.pattern})).*\n\n", re.M | _LOST_PEER.flags
)


class Failure:
    """An error of a call.

    Args:
        rank: The rank that has failed. None: the call as a whole, such as by its timeout.
        error: The exception to raise for it.
        asked: Whether the rank was asked to end the call before it failed.
    """

    def __init__(self, rank: int | None, error: BaseException, asked: bool = False) -> None:
        self.rank, self.error, self.asked = rank, error, asked

    def is_consequence(self) -> bool:
        """Return whether another rank's failure caused this one: the rank was asked to leave, or lost its peer.

        A function may convert the first exception into another one, whose traceback still shows the first one.
        """
        lost_peer = isinstance(self.error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(text_of(self.error)))
        cause = self.error.__cause__
        follows = self.asked and isinstance(cause, RemoteTraceback) and bool(_FOLLOWS.search(cause.text))
        return lost_peer or follows or isinstance(self.error, KeyboardInterrupt)


class Decision(enum.Enum):
    """The next action for the ranks that have not answered."""

    GO_ON = "wait for them"
    ASK_TO_LEAVE = "ask them to leave the call"
    ABORT = "abort their process groups"
    GIVE_UP = "wait no longer"
    TIME_OUT = "fail with `RankTimeout`"


class Ending:
    """The time of a call, and its state after a failure or an interrupt.

    Args:
        timeout: The longest time of the call from now on, in seconds. None: no limit.
        on_gpu: Whether the ranks have GPUs.
        patience: Seconds until the engine knows of the loss of a rank; 0 if it knows at once.

    Attributes:
        leaving: Whether the ranks were asked to end the call: errors from then on are consequences.
        at_once: Whether the process groups of the ranks are aborted without a delay.
        aborted: Whether the process groups of the remaining ranks were aborted.
        interrupted: Whether the user, or the exception of a signal handler, has interrupted the call.
        given_up: Whether the ranks are not waited for any more.
        failures: The failures, in the order in which they came.
    """

    def __init__(self, *, timeout: float | None, on_gpu: bool, patience: float) -> None:
        self.leaving = self.at_once = self.aborted = self.interrupted = self.given_up = False
        self.failures: list[Failure] = []
        self._begin = time.monotonic()
        self._deadline = None if timeout is None else self._begin + timeout
        self._on_gpu, self._patience = on_gpu, patience
        self._grace, self._load = 0.0, 1.0
        self._has_been_patient = self._waited_to_begin = False

    def elapsed(self) -> float:
        """Return the seconds since the beginning of the call."""
        return time.monotonic() - self._begin

    def left(self, most: float) -> float:
        """Return the seconds until `decide` must be called, at most `most`; 0 or less if it must be called now."""
        return most if self._deadline is None else min(most, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a block, in which the user answers a rank, from the time of the call."""
        begin = time.monotonic()
        try:
            yield
        finally:
            if self._deadline is not None:
                self._deadline += time.monotonic() - begin

    def fail(self, rank: int | None, error: BaseException) -> Decision:
        """Record that a rank, or the call as a whole, has failed."""
        self.failures.append(Failure(rank, error, self.leaving))
        if self.leaving:
            return Decision.GO_ON
        return self._leave(GRACE_WITH_GPU if self._on_gpu else GRACE_AFTER_FAILURE, at_once=True)

    def interrupt(self) -> Decision:
        """Record that the user stops the call."""
        self.interrupted = True
        return self._leave(GRACE_AFTER_INTERRUPT, at_once=False)

    def _leave(self, grace: float, at_once: bool) -> Decision:
        self._load = max(1.0, load_per_core())
        self.leaving, self.at_once, self._grace = True, at_once, self._on_this_machine(grace)
        return Decision.ASK_TO_LEAVE

    def asked_to_leave(self, all_begun: bool) -> None:
        """Record that all ranks have been asked to leave by now, and whether each of them had begun the call."""
        if not self.aborted:
            self._waited_to_begin = not all_begun
            before_abort = 0.0 if self.at_once else GRACE_BEFORE_ABORT
            grace = self._on_this_machine(before_abort if all_begun else GRACE_TO_BEGIN)
            self._deadline = time.monotonic() + grace

    def was_aborted(self, all_begun: bool) -> None:
        """Record that the process groups were aborted, and whether each rank had begun the call."""
        enough = all_begun or self._waited_to_begin
        grace = self._grace if enough else max(self._grace, self._on_this_machine(GRACE_TO_BEGIN))
        self._deadline = time.monotonic() + grace

    def begun(self, all_begun: bool) -> None:
        """Record that a rank begins the call after it was asked to leave, and whether each rank has begun it now."""
        if all_begun and not self.aborted:
            self.asked_to_leave(all_begun)
        else:
            self._extend(self._grace)

    def reporting(self) -> None:
        """Record that a rank has raised and sends its exception, or reports an uninterruptible step."""
        self._extend(self._on_this_machine(GRACE_TO_REPORT))

    def _on_this_machine(self, seconds: float) -> float:
        return min(seconds * self._load, max(seconds, MOST_GRACE))

    def _extend(self, seconds: float) -> None:
        if self.leaving and self._deadline is not None:
            self._deadline = max(self._deadline, time.monotonic() + seconds)

    def decide(self) -> Decision:
        """Return what to do now, given the time since the beginning of the call or of its end."""
        if self.left(1.0) > 0:
            return Decision.GO_ON
        if not self.leaving:
            return Decision.TIME_OUT
        if not self.aborted:
            return Decision.ABORT
        if self._cause_may_follow():
            self._has_been_patient, self._deadline = True, time.monotonic() + self._patience
            return Decision.GO_ON
        self.given_up = True
        return Decision.GIVE_UP

    def _cause_may_follow(self) -> bool:
        """Return whether all known failures follow from the loss of a rank that has not been reported yet."""
        lost = bool(self.failures) and all(failure.is_consequence() for failure in self.failures)
        return lost and self._patience > 0 and not self._has_been_patient and not self.interrupted

    def cause(self) -> Failure:
        """Return the root cause, with the failures of the other ranks listed under it."""
        earliest = self.failures[0]
        first, *others = sorted(self.failures, key=Failure.is_consequence)
        others.sort(key=lambda failure: -1 if failure.rank is None else failure.rank)
        if isinstance(first.error.__cause__, RemoteTraceback):
            first.error.__cause__.others = [
                f"also failed: rank {other.rank}: {type(other.error).__name__}: {text_of(other.error)}".splitlines()[0]
                for other in others
                if not other.is_consequence() or (other is earliest and first.asked)
            ]
        return first

"""Decisions about a call that does not end well: after a failure, an interrupt or the timeout.

Nothing is sent from here: `Waiting` reports what happens, and carries the decisions out.
"""

from __future__ import annotations

import contextlib
import enum
import re
import time
from collections.abc import Iterator

from ...errors import RemoteTraceback, text_of

#: Seconds that the other ranks get to leave by themselves after the first failure: enough to report their own errors.
GRACE_AFTER_FAILURE = 0.8
#: The same for ranks with a GPU: a wait of theirs ends when the GPU has done all that it was given before.
GRACE_WITH_GPU = 5.0
#: Seconds that one of them gets to begin the call, which it does to leave: on a busy machine it may still be joining.
GRACE_TO_BEGIN = 5.0
#: Seconds that a rank which has raised gets to send its error: a traceback with its source takes a while to render. A
#: rank gets as many each time that it reports work which must not be broken off, such as an import.
GRACE_TO_TELL = 5.0
#: Seconds that ranks get to clean up after an interrupt of the cell.
GRACE_AFTER_INTERRUPT = 5.0
#: Seconds from an interrupt until waits in process groups are broken off, unless a rank has left its group before.
GRACE_BEFORE_ABORT = 2.0

#: The text of a rank's error when a peer has gone: a consequence, and not the cause of a failure.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by peer|socket closed"
    r"|ncclRemoteError|remote process exit|NCCL communicator was aborted",
    re.I,
)
#: A line of a traceback: the exception that a rank raises first when it loses its peer or is asked to leave.
_FOLLOWS = re.compile(
    rf"^(KeyboardInterrupt|[\w.]*(?:Error|Exception): .*({_LOST_PEER.pattern})).*\n\n", re.M | _LOST_PEER.flags
)


class Failure:
    """An error of a call.

    Args:
        rank: The rank that has failed. None: the call as a whole, such as by its timeout.
        error: The exception to raise for it.
        asked: Whether the rank had been asked to leave by then.
    """

    def __init__(self, rank: int | None, error: BaseException, asked: bool = False) -> None:
        self.rank, self.error, self.asked = rank, error, asked

    def is_consequence(self) -> bool:
        """Return whether this failure follows from another rank's: the rank was asked to leave, or lost its peer.

        A function may raise another exception then; the traceback has the one that it follows from.
        """
        lost_peer = isinstance(self.error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(text_of(self.error)))
        cause = self.error.__cause__
        follows = self.asked and isinstance(cause, RemoteTraceback) and bool(_FOLLOWS.search(cause.text))
        return lost_peer or follows or isinstance(self.error, KeyboardInterrupt)


class Decision(enum.Enum):
    """The next step with the ranks that have not answered."""

    GO_ON = "wait for them"
    ASK_TO_LEAVE = "ask them to leave the call"
    ABORT = "break off their waits in their process groups"
    GIVE_UP = "wait no longer"
    TIME_OUT = "fail with `RankTimeout`"


class Ending:
    """The time of a call, and its state on the way to a bad end.

    Args:
        timeout: Seconds that the call may take from now on. None: any time.
        on_gpu: Whether the ranks have GPUs.
        patience: Seconds until an engine knows of each loss of a rank; 0 where it knows at once.

    Attributes: `leaving`: the ranks were asked to leave, and errors that follow are no causes. `at_once`: their waits
    are broken off without a delay; `aborted`: that has been done. `interrupted`: by the user. `given_up`: they are not
    waited for any more. `failures`, in the order in which they came.
    """

    def __init__(self, *, timeout: float | None, on_gpu: bool, patience: float) -> None:
        self.leaving = self.at_once = self.aborted = self.interrupted = self.given_up = False
        self.failures: list[Failure] = []
        self._begin = time.monotonic()
        self._deadline = None if timeout is None else self._begin + timeout
        self._on_gpu, self._patience = on_gpu, patience
        self._grace = 0.0
        self._has_been_patient = False

    def elapsed(self) -> float:
        """Return the seconds since the beginning of the call."""
        return time.monotonic() - self._begin

    def left(self, most: float) -> float:
        """Return the seconds until `decide` has something to decide, at most `most`; 0 or less when it has."""
        return most if self._deadline is None else min(most, self._deadline - time.monotonic())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the time of a block, in which the user answers a rank, for none of the call's."""
        begin = time.monotonic()
        try:
            yield
        finally:
            if self._deadline is not None:
                self._deadline += time.monotonic() - begin

    def fail(self, rank: int | None, error: BaseException) -> Decision:
        """Note that a rank, or the call as a whole, has failed."""
        self.failures.append(Failure(rank, error, self.leaving))
        if self.leaving:
            return Decision.GO_ON
        return self._leave(GRACE_WITH_GPU if self._on_gpu else GRACE_AFTER_FAILURE, at_once=True)

    def interrupt(self) -> Decision:
        """Note that the user stops the call."""
        self.interrupted = True
        return self._leave(GRACE_AFTER_INTERRUPT, at_once=False)

    def _leave(self, grace: float, at_once: bool) -> Decision:
        self.leaving, self.at_once, self._grace = True, at_once, grace
        return Decision.ASK_TO_LEAVE

    def asked_to_leave(self) -> None:
        """Note that all ranks have been asked to leave by now."""
        if not self.aborted:
            self._deadline = time.monotonic() + (0.0 if self.at_once else GRACE_BEFORE_ABORT)

    def waits_broken_off(self, all_begun: bool) -> None:
        """Note that the ranks' waits have been broken off by now, and whether each rank had begun the call."""
        self._deadline = time.monotonic() + (self._grace if all_begun else max(self._grace, GRACE_TO_BEGIN))

    def begun(self) -> None:
        """Note that a rank begins the call which it is to leave."""
        self._extend(self._grace)

    def reporting(self) -> None:
        """Note that a rank has raised and writes its error, or does what must not be broken off."""
        self._extend(GRACE_TO_TELL)

    def _extend(self, seconds: float) -> None:
        if self.leaving and self._deadline is not None:
            self._deadline = max(self._deadline, time.monotonic() + seconds)

    def decide(self) -> Decision:
        """Return what follows from the time."""
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
        """Return whether each failure so far follows from the loss of a rank, which the engine may report later."""
        lost = bool(self.failures) and all(failure.is_consequence() for failure in self.failures)
        return lost and self._patience > 0 and not self._has_been_patient and not self.interrupted

    def cause(self) -> Failure:
        """Return the failure to raise, with the other ranks' failures listed in its traceback."""
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

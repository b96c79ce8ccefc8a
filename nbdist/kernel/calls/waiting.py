"""Waiting for the ranks of one call: answers, output, deaths, an interrupt, a timeout. The first failure ends all."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...deaths import NO_GPU
from ...engines.contract import Exit, Listening
from ...errors import CaptureError, RankStuck, RankTimeout, RemoteTraceback, text_of
from ...system.connections import Address, between
from ...system.free_memory import lack_of_address_space
from ...wire import protocol, rank_memory
from ...wire.parcel import Parcel
from ..cell.comms import Page
from . import stacks
from .futures import Stop
from .group import Group
from .hangs import Hangs
from .keyboard import Keyboard
from .outcomes import load, rebuild
from .stopping import unanswered_stop

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

#: Seconds between two looks at a rank's output. It looks live, and ranks that print at each batch, or have a progress
#: bar, do not wake the kernel each time, on a core that they need. The first line after a pause is shown at once.
OUTPUT_INTERVAL = 0.3

#: The longest single wait, in seconds. CPython runs signal handlers between bytecodes only, so a signal that comes just
#: before a wait, or in another thread, is noticed when the wait ends.
AT_A_TIME = 1.0

#: Seconds after which the cell shows where ranks are that have received a call and not begun it.
LONG_START = 30.0

#: The cell shows that ranks waited for others if a call took more than these seconds and waited more than this share.
LONG_CALL, MUCH_WAITING = 10.0, 0.2

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


@dataclass
class _Failure:
    rank: int | None
    error: BaseException
    asked: bool = False
    """True if the rank had been asked to leave before it failed."""

    def is_consequence(self) -> bool:
        """Return whether another rank's failure caused this one: the rank was asked to leave, or lost its peer.

        The function may turn the first exception into another one. The traceback still shows the first one.
        """
        lost_peer = isinstance(self.error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(text_of(self.error)))
        cause = self.error.__cause__
        follows = self.asked and isinstance(cause, RemoteTraceback) and bool(_FOLLOWS.search(cause.text))
        return lost_peer or follows or isinstance(self.error, KeyboardInterrupt)


class Waiting:
    """The wait for one call, until each of its ranks has answered, failed, died or been given up.

    Attributes:
        pending: The ranks that have not answered. After `wait` has raised: the ranks that did not end the call, or
            cannot take another one.
        ended: The reason why one of these has ended after its answer; empty if none has.
    """

    def __init__(
        self,
        group: Group,
        targets: Iterable[int],
        what: str,
        *,
        timeout: float | None = None,
        originals: Sequence[Any] = (),
        stop: Stop | None = None,
        keyboard: Keyboard | None = None,
        once: bool = False,
        on_hang: str = "say",
    ) -> None:
        """
        Args:
            group: The ranks of the session.
            targets: The ranks to which the call was sent.
            what: The name of the function.
            timeout: The longest time of the call, in seconds; None: no limit.
            originals: The objects that were sent by number, as in `capture.Call.originals`.
            stop: Interrupts the call from another thread.
            keyboard: The source of lines that ranks ask for. None: the user types them.
            once: Whether the ranks end after the call, so that their state may be lost.
            on_hang: What happens when the ranks can never go on: "raise" fails with `RankStuck`, "say" shows the reason
                in the cell.
        """
        self._once = once
        self._group, self._ranks, self._relay = group, group.ranks, group.relay
        self._timeout, self._originals, self._stop = timeout, originals, stop
        asks = stop is None or group.relay.cell.takes_input
        refusal = "" if asks else "a call in the background has no cell that can ask"
        self._keyboard = keyboard or Keyboard(group, refusal=refusal)
        self._page = Page(group.relay.comms, foreground=stop is None)
        self.pending = set(targets)
        self._hangs, self._on_hang = Hangs(group, self.pending), on_hang
        self._begun: set[int] = set()
        self._explained = False  # whether the cell shows that the stop waits for an uninterruptible step
        self._begin = time.monotonic()
        self._warns_of_late_ranks = True
        self._deadline = None if timeout is None else self._begin + timeout
        self._interrupted = False  # by the user, or by the exception of a signal handler, which is:
        self._raised: BaseException | None = None
        self._leaving = False  # the ranks were asked to end the call: errors from then on are consequences
        self._aborted = False  # the process groups of the remaining ranks were aborted
        self._grace = 0.0  # seconds that the ranks get after the abort
        self._given_up = False
        self.ended = ""
        self._patient = False  # the extra time in which the loss of a rank may be reported has been given
        self._unfit: set[int] = set()  # ranks that are not waited for any more, and cannot take another call
        self._answers: dict[int, Parcel | None] = {}
        self._waited: dict[int, float] = {}  # seconds that each rank waited for others
        self._copied: dict[int, list[memoryview]] = {}  # big buffers, copied before their answer arrives
        self._failures: list[_Failure] = []
        for rank in self.pending:
            group.note(rank, "running", what)

    def wait(self, interrupted: bool = False) -> list[Any]:
        """Wait for all ranks, and return their values in the order of the ranks; None for a rank that returns none.

        Args:
            interrupted: Whether an interrupt came while the call was sent.

        Raises the first failure, `RankTimeout`, `RankStuck` or `KeyboardInterrupt`. If no rank is `pending` or dead
        then, the ranks can take calls again, in a new process group.
        """
        try:
            self._listen_until_done(interrupted)
            self.pending |= self._unfit
            self._relay.drain()
            self._relay.flush()
            if self._raised is not None:
                raise self._raised
            if self._interrupted or self._failures:
                raise self._failure()
            self._show_waiting_shares()
            answers = [self._answers[rank] for rank in sorted(self._answers)]
            try:
                return [None if parcel is None else load(parcel, self._originals) for parcel in answers]
            except MemoryError:
                raise
            except Exception as exc:
                why = f"{type(exc).__name__}: {text_of(exc)}"
                error = CaptureError(f"the function returned, but its value cannot be rebuilt here ({why})")
                raise error.with_value(getattr(exc, "value", None)) from exc
        except KeyboardInterrupt as exc:
            if self.pending and not exc.args and exc.__cause__ is None:  # an interrupt between two steps
                raise unanswered_stop(self._ranks, self.pending) from None
            raise
        finally:
            self._page.close()
            self._relay.comms.end_call()
            self._relay.cell.close()
            for parcel in self._answers.values():
                if parcel is not None:
                    parcel.close()

    def _listen_until_done(self, interrupted: bool) -> None:
        """Handle events until all ranks have answered, or their time to end the call is over."""
        with contextlib.ExitStack() as stack:
            listener: Listening | None = None
            while True:  # once more after an interrupt, which may come anywhere in the block
                try:
                    if interrupted:
                        self._interrupted = True
                        self._ask_to_leave(GRACE_AFTER_INTERRUPT, GRACE_BEFORE_ABORT)
                    if listener is None:
                        listener = stack.enter_context(contextlib.closing(self._listen()))
                    while self.pending and not self._given_up:
                        self._step(listener)
                    return
                except BaseException as exc:
                    if not isinstance(exc, KeyboardInterrupt):  # from the user's signal handler, such as for SIGALRM
                        self._raised = self._raised or exc
                    if self._interrupted:  # the second interrupt ends the wait at once
                        return
                    interrupted = True

    def _show_waiting_shares(self) -> None:
        """Show in the cell that ranks of a long call waited for another rank, if they did so for much of the time."""
        took = time.monotonic() - self._begin
        shares = {rank: self._waited.get(rank, 0.0) / took for rank in self._answers}
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        if took > LONG_CALL and shares[most] > MUCH_WAITING and most != least:
            one = shares[least] < shares[most] / 2
            reason = "it is the one that they wait for" if one else "for none of them more than for the rest"
            self._relay.cell.notice(
                f"rank {most} waited {100 * shares[most]:.0f} % of the time for others, rank {least} "
                f"{100 * shares[least]:.0f} %: {reason}. session.profile shows what {'it does' if one else 'they do'}"
            )

    def _failure(self) -> BaseException:
        """Return the exception to raise: the root cause, with the failures of the other ranks listed under it."""
        if self._interrupted:
            errors = [f.error for f in self._failures if isinstance(f.error, KeyboardInterrupt)]
            return errors[0] if errors and not self.pending else unanswered_stop(self._ranks, self.pending)
        earliest = self._failures[0]
        first, *others = sorted(self._failures, key=_Failure.is_consequence)
        others.sort(key=lambda failure: -1 if failure.rank is None else failure.rank)
        if first.rank in self._group.raised:
            self._group.raised.sort(key=lambda rank: rank != first.rank)
        if isinstance(first.error.__cause__, RemoteTraceback):
            first.error.__cause__.others = [
                f"also failed: rank {other.rank}: {type(other.error).__name__}: {text_of(other.error)}".splitlines()[0]
                for other in others
                if not other.is_consequence() or (other is earliest and first.asked)
            ]
        return first.error

    def _listen(self) -> Listening:
        listener = self._ranks.listen(
            on_output=self._relay.take,
            on_message=self._on_message,
            on_exit=self._on_exit,
            pause=OUTPUT_INTERVAL,
        )
        if self._stop is not None:
            listener.watch(self._stop.fd, self._on_stop)
        return listener

    def _on_stop(self) -> None:
        assert self._stop is not None
        os.read(self._stop.fd, 1)
        raise KeyboardInterrupt

    def _step(self, listener: Listening) -> None:
        left = AT_A_TIME if self._deadline is None else min(AT_A_TIME, self._deadline - time.monotonic())
        if left > 0:
            self._warn_of_late_ranks()
            self._look_for_hang()
            listener.select(self._page.soon(self._keyboard.soon(left)))
            self._relay.show_unfinished()
            self._page.look()
            self._ask_user()
        elif self._leaving and not self._aborted:
            self._abort()
        elif self._leaving and self._cause_may_follow():
            self._patient, self._deadline = True, time.monotonic() + self._ranks.patience
        elif self._leaving:  # the time to end the call is over
            self._given_up = True
        else:
            where = stacks.take(self._ranks, self.pending)
            self._fail(None, RankTimeout(f"not done after {self._timeout:g} s: {stacks.report(where)}"))

    def _warn_of_late_ranks(self) -> None:
        """Show once where the ranks are that have not begun the call after `LONG_START` seconds."""
        self._warns_of_late_ranks = self._warns_of_late_ranks and not self._leaving and not self.pending <= self._begun
        if not self._warns_of_late_ranks or time.monotonic() < self._begin + LONG_START:
            return
        if starting := self._ranks.starting():
            self._warns_of_late_ranks = False
            self._relay.cell.notice(
                f"no ranks after {LONG_START:g} s: {starting}. If it never ends, stop the call: later calls do without"
            )
        late = {rank for rank in self.pending - self._begun if self._ranks.pids[rank] is not None}
        if late:
            self._warns_of_late_ranks = False
            taken = stacks.take(self._ranks, late)
            where = stacks.report({rank: taken[rank] for rank in sorted(late)})
            self._relay.cell.notice(f"not begun after {LONG_START:g} s: {where}")

    def _look_for_hang(self) -> None:
        """Show once why the ranks can never go on, or fail with this reason."""
        found = None if self._leaving else self._hangs.look(self.pending)
        if found is not None and self._on_hang == "raise":
            where = stacks.report(stacks.take(self._ranks, self.pending))
            self._fail(None, RankStuck(f"{found}\n\n{where}"))
        elif found is not None:
            self._relay.cell.notice(f"{found}. The stop button ends the call; on_hang='raise' would have ended it")

    def _ask_user(self) -> None:
        """Ask the user for a line if a rank waits for one. The time until the answer does not count as the call's."""
        if self._keyboard.ready():
            begin = time.monotonic()
            try:
                self._keyboard.put(self.pending)
            finally:
                if self._deadline is not None:
                    self._deadline += time.monotonic() - begin

    def _cause_may_follow(self) -> bool:
        """Return whether all known failures follow from the loss of a rank that has not been reported yet."""
        lost = bool(self._failures) and all(failure.is_consequence() for failure in self._failures)
        return lost and self._ranks.patience > 0 and not self._patient and not self._interrupted

    def _ask_to_leave(self, grace: float, before_abort: float = 0.0) -> None:
        self._leaving, self._grace = True, grace
        self._keyboard.close()
        self._group.leave()
        with self._ranks.together():
            for rank in list(self.pending):
                if self._ranks.pids[rank] is None:  # not started, so there is nothing to wait for
                    self.pending.discard(rank)
                    self._unfit.add(rank)  # the call was sent to it, and it may still begin
                else:
                    self._ranks.signal(rank, signal.SIGINT)
        with self._ranks.together():
            for rank in range(len(self._ranks.pids)):
                if rank not in self.pending:
                    self._dismiss(rank)
            if not before_abort:
                self._abort()
        if not self._aborted:
            self._deadline = time.monotonic() + before_abort

    def _abort(self) -> None:
        """Abort the collectives in which the remaining ranks wait."""
        if not self._aborted:
            self._aborted = True
            with self._ranks.together():
                for rank in self.pending:
                    self._ranks.abort(rank, self._group.number, self._peers[rank])
            # The time counts from here: finding the connections of many ranks takes long.
            grace = self._grace if self.pending <= self._begun else max(self._grace, GRACE_TO_BEGIN)
            self._deadline = time.monotonic() + grace

    def _dismiss(self, rank: int) -> None:
        """Make a rank that is done leave the process group, so that ranks that wait for it there fail and leave too."""
        self._group.send(rank, protocol.Leave(self._peers[rank]))
        self._abort()

    @functools.cached_property
    def _peers(self) -> list[list[Address]]:
        """The connections of each rank to others, by rank: the addresses of the other ends."""
        return between(self._ranks.connections())

    def _fail(self, rank: int | None, error: BaseException) -> None:
        self._failures.append(_Failure(rank, error, self._leaving))
        if rank is not None:
            self.pending.discard(rank)
            pid = self._ranks.pids[rank] if self._ranks.takes_descriptors else None  # else one of another machine
            if lack := lack_of_address_space(f"{type(error).__name__}: {text_of(error)}", pid):
                self._relay.cell.notice(f"rank {rank} {lack}")
        if not self._leaving:
            on_cpu = self._group.layout.devices[0] == "cpu"
            self._ask_to_leave(GRACE_AFTER_FAILURE if on_cpu else GRACE_WITH_GPU)

    def _on_message(self, rank: int, message: protocol.FromRank, parcel: Parcel | None) -> None:
        match message:
            case protocol.Notice(text):
                self._relay.cell.notice(text)
            case protocol.Begun():
                self._on_begun(rank)
            case protocol.Raised():
                self._extend_deadline()
            case protocol.Finishing():
                self._on_finishing(rank, message)
            case protocol.Prompt():
                self._keyboard.ask(rank, message)
            case protocol.Buffers(buffers):
                self._copy(rank, buffers)
            case protocol.Done() | protocol.Error():
                self._on_answer(rank, message, parcel)

    def _on_begun(self, rank: int) -> None:
        self._begun.add(rank)
        if self._leaving and rank in self.pending:
            self._ranks.signal(rank, signal.SIGINT)
            if self._deadline is not None:
                self._deadline = max(self._deadline, time.monotonic() + self._grace)

    def _extend_deadline(self) -> None:
        if self._leaving and self._deadline is not None:
            self._deadline = max(self._deadline, time.monotonic() + GRACE_TO_REPORT)

    def _on_finishing(self, rank: int, message: protocol.Finishing) -> None:
        self._extend_deadline()
        if self._once:
            self.pending.discard(rank)
            self._unfit.add(rank)
        elif message.seconds > 0.5 and self._interrupted and not self._explained:
            self._explained = True
            self._relay.cell.notice(f"rank {rank} {message.what} first; stop once more to kill the ranks at once")

    def _on_answer(self, rank: int, message: protocol.Done | protocol.Error, parcel: Parcel | None) -> None:
        failed = isinstance(message, protocol.Error)
        if rank not in self.pending and (not failed or rank in self._answers or self._leaving):
            if parcel is not None:
                parcel.close()
        elif isinstance(message, protocol.Error):
            if message.ends:
                self._unfit.add(rank)
                self.ended = self.ended or f"rank {rank} {message.ends}"
            self._group.note(rank, "raised")
            self._group.raised.append(rank)
            error = rebuild(rank, self._ranks.pids[rank], message, parcel, self._originals)
            if isinstance(error.__cause__, RemoteTraceback):
                error.__cause__.hints += self._group.explain_gpu_error(rank, error, lost=message.ends == NO_GPU)
            self._fail(rank, error)
        else:
            self.pending.discard(rank)
            self._answers[rank] = parcel
            if parcel is not None:
                parcel.buffers = self._copied.pop(rank, [])
            self._group.note(rank, "idle")
            self._waited[rank] = message.waited
            if not message.grouped:
                self._group.leave()
        if self._leaving:
            self._dismiss(rank)

    def _copy(self, rank: int, buffers: Sequence[rank_memory.RankBuffer]) -> None:
        """Copy the big buffers of a rank's answer out of its memory, and report to the rank whether that worked.

        The rank waits for the report. It sends the buffers itself if they could not be copied.
        """
        pid = self._ranks.pids[rank]
        try:
            if rank in self.pending and pid is not None:
                with contextlib.suppress(OSError, MemoryError):  # the rank then sends them, or an error
                    self._copied[rank] = rank_memory.copy(pid, buffers)
        finally:  # the rank waits for the report after an interrupt, too
            self._group.send(rank, protocol.Copied(rank in self._copied))

    def _on_exit(self, exit: Exit) -> None:
        if exit.rank in self._unfit:  # as expected
            return
        died = self._group.record_death(exit)
        known = exit.rank in self._answers or any(failure.rank == exit.rank for failure in self._failures)
        if exit.rank in self.pending or not (known or self._leaving):  # also a rank that only joined the process group
            self._fail(exit.rank, died)

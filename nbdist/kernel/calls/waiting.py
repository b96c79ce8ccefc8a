"""Waiting for ranks: their answers, their output, their deaths, an interrupt, a timeout; the first failure ends all."""

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

#: Seconds that the other ranks get to leave by themselves after the first failure: enough to tell their own errors.
GRACE_AFTER_FAILURE = 0.8
#: As many for ranks with a GPU: what they wait for ends when the GPU has done all that it was asked before.
GRACE_WITH_GPU = 5.0
#: Seconds that one of them gets to begin the call, which it does to leave: on a busy machine it may still be joining.
GRACE_TO_BEGIN = 5.0
#: Seconds that a rank which has raised gets to tell what: a traceback with its source takes a while to render. As many
#: gets one each time that it says that it still does what is not to be left by half, such as an import.
GRACE_TO_TELL = 5.0
#: Seconds that ranks get to clean up after an interrupt of the cell.
GRACE_AFTER_INTERRUPT = 5.0
#: Seconds after which it breaks off what they wait for in their process groups, unless one has left these before.
GRACE_BEFORE_ABORT = 2.0

#: Seconds from one look at a rank's output to the next: live for an eye, and ranks that print once a batch, or have a
#: progress bar, are spared a kernel that wakes up each time, on a core that they need. The first line after a pause is
#: seen at once.
OUTPUT_INTERVAL = 0.3

#: Seconds for which one waits at a time. Python hears of a signal between two steps of its own: of one that comes right
#: before a wait, or in another thread, only at the end of that.
AT_A_TIME = 1.0

#: Seconds after which a call is told where ranks are that have got it and have not begun.
LONG_START = 30.0

#: Seconds from which on a call is told that ranks waited for others, and the share of its time from which on.
LONG_CALL, MUCH_WAITING = 10.0, 0.2

#: What a rank says when a peer has gone: a consequence, and not the cause of a failure.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by peer|socket closed"
    r"|ncclRemoteError|remote process exit|NCCL communicator was aborted",
    re.I,
)
#: A line of a traceback: the exception that a rank raises first when it loses its peer or is asked to leave.
_FOLLOWS = re.compile(
    rf"^(KeyboardInterrupt|[\w.]*(?:Error|Exception): .*({_LOST_PEER.pattern})).*\n\n", re.M | _LOST_PEER.flags
)


@dataclass
class _Failure:
    rank: int | None
    error: BaseException
    asked: bool = False
    """Whether the rank had been asked to leave by then."""

    def is_consequence(self) -> bool:
        """Return whether this failure follows from another rank's: the rank was asked to leave, or lost its peer.

        A function may raise another exception then; the traceback has the one that it follows from.
        """
        lost_peer = isinstance(self.error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(text_of(self.error)))
        cause = self.error.__cause__
        told = self.asked and isinstance(cause, RemoteTraceback) and bool(_FOLLOWS.search(cause.text))
        return lost_peer or told or isinstance(self.error, KeyboardInterrupt)


class Waiting:
    """One call being waited for, until each of its ranks has answered, failed, died or been given up.

    Attributes: `pending`, the ranks that have not answered; after `wait` has raised, those that would not leave, or
    cannot take another call. `ended`, why one of these has ended after its answer, if one has.
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
            group: Whose ranks have got the call.
            targets: The ranks that have.
            what: The name of what they run.
            timeout: Seconds that they may take.
            originals: What was sent by number, as `capture.Call.originals` has it.
            stop: Lets another thread interrupt the call.
            keyboard: Gives the lines that ranks ask for. None: what the user types.
            once: Whether the ranks end after the call, so that nothing of them needs to stay whole.
            on_hang: Where the ranks wait for what cannot come: "raise" fails with `RankStuck`, "say" writes why into
                the cell.
        """
        self._once = once
        self._group, self._ranks, self._relay = group, group.ranks, group.relay
        self._timeout, self._originals, self._stop = timeout, originals, stop
        asks = stop is None or group.relay.cell.takes_input
        refusal = "" if asks else "a call in the background has no cell that could ask"
        self._keyboard = keyboard or Keyboard(group, refusal=refusal)
        self._page = Page(group.relay.comms, foreground=stop is None)
        self.pending = set(targets)
        self._hangs, self._on_hang = Hangs(group, self.pending), on_hang
        self._begun: set[int] = set()
        self._explained = False  # that a stop waits for the end of what it would leave by half
        self._begin = time.monotonic()
        self._tells_of_late_ones = True
        self._deadline = None if timeout is None else self._begin + timeout
        self._interrupted = False  # by the user, or by what a signal's handler has raised:
        self._raised: BaseException | None = None
        self._leaving = False  # the ranks were asked to leave: what they do then is no failure of theirs
        self._aborted = False  # what the ranks that are left wait for in their process groups was broken off
        self._grace = 0.0  # seconds that they get after that
        self._given_up = False
        self.ended = ""
        self._patient = False  # the loss of a rank was waited for
        self._unfit: set[int] = set()  # not waited for any more, and not fit for another call
        self._answers: dict[int, Parcel | None] = {}
        self._waited: dict[int, float] = {}  # seconds for other ranks, where that was more than a moment
        self._copied: dict[int, list[memoryview]] = {}  # big buffers of answers that are about to come
        self._failures: list[_Failure] = []
        for rank in self.pending:
            group.note(rank, "running", what)

    def wait(self, interrupted: bool = False) -> list[Any]:
        """The answers by rank, None where no value was asked for.

        Args:
            interrupted: Whether the user has pressed stop already, while the call was sent.

        Raises the failure that came first, `RankTimeout`, `RankStuck` or `KeyboardInterrupt`. When it raises, and no
        rank is `pending` or dead, the ranks can take calls again, in a new process group.
        """
        try:
            self._hear(interrupted)
            self.pending |= self._unfit
            self._relay.drain()
            self._relay.flush()
            if self._raised is not None:
                raise self._raised
            if self._interrupted or self._failures:
                raise self._failure()
            self._tell_of_waiting()
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
            if self.pending and not exc.args and exc.__cause__ is None:  # a press that came between two steps
                raise unanswered_stop(self._ranks, self.pending) from None
            raise
        finally:
            self._page.close()
            self._relay.comms.end_call()
            self._relay.cell.close()
            for parcel in self._answers.values():
                if parcel is not None:
                    parcel.close()

    def _hear(self, interrupted: bool) -> None:
        """Hear the ranks until all have answered, or have had their chance."""
        with contextlib.ExitStack() as stack:
            listener: Listening | None = None
            while True:  # again after an interrupt, wherever it comes
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
                    if not isinstance(exc, KeyboardInterrupt):  # of a handler of SIGALRM, say: a timeout of the user's
                        self._raised = self._raised or exc
                    if self._interrupted:  # a second one: no more patience
                        return
                    interrupted = True

    def _tell_of_waiting(self) -> None:
        """Say that ranks of a long call waited for another, if they did so for much of the time."""
        took = time.monotonic() - self._begin
        shares = {rank: self._waited.get(rank, 0.0) / took for rank in self._answers}
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        if took > LONG_CALL and shares[most] > MUCH_WAITING and most != least:
            one = shares[least] < shares[most] / 2
            whom = "it is the one that they wait for" if one else "for none of them more than for the rest"
            self._relay.cell.notice(
                f"rank {most} waited {100 * shares[most]:.0f} % of the time for others, rank {least} "
                f"{100 * shares[least]:.0f} %: {whom}. session.profile shows what {'it does' if one else 'they do'}"
            )

    def _failure(self) -> BaseException:
        """The exception to raise: the root cause, with the other ranks' failures listed under it."""
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
            self._tell_of_late_ones()
            self._look_for_hang()
            listener.select(self._page.soon(self._keyboard.soon(left)))
            self._relay.show_unfinished()
            self._page.look()
            self._ask_user()
        elif self._leaving and not self._aborted:
            self._abort()
        elif self._leaving and self._cause_may_follow():
            self._patient, self._deadline = True, time.monotonic() + self._ranks.patience
        elif self._leaving:  # they had their chance
            self._given_up = True
        else:
            where = stacks.take(self._ranks, self.pending)
            self._fail(None, RankTimeout(f"not done after {self._timeout:g} s: {stacks.report(where)}"))

    def _tell_of_late_ones(self) -> None:
        """Say once where ranks are that have not begun for long."""
        self._tells_of_late_ones = self._tells_of_late_ones and not self._leaving and not self.pending <= self._begun
        if not self._tells_of_late_ones or time.monotonic() < self._begin + LONG_START:
            return
        if starting := self._ranks.starting():
            self._tells_of_late_ones = False
            self._relay.cell.notice(
                f"no ranks after {LONG_START:g} s: {starting}. If it never ends, stop the call: later calls do without"
            )
        late = {rank for rank in self.pending - self._begun if self._ranks.pids[rank] is not None}
        if late:
            self._tells_of_late_ones = False
            taken = stacks.take(self._ranks, late)
            where = stacks.report({rank: taken[rank] for rank in sorted(late)})
            self._relay.cell.notice(f"not begun after {LONG_START:g} s: {where}")

    def _look_for_hang(self) -> None:
        """Say once why the ranks wait for what cannot come, or fail with that."""
        found = None if self._leaving else self._hangs.look(self.pending)
        if found is not None and self._on_hang == "raise":
            where = stacks.report(stacks.take(self._ranks, self.pending))
            self._fail(None, RankStuck(f"{found}\n\n{where}"))
        elif found is not None:
            self._relay.cell.notice(f"{found}. The stop button ends the call, on_hang='raise' would have ended it")

    def _ask_user(self) -> None:
        """Let the user type what a rank waits for, if one does. The time that he takes is not the call's."""
        if self._keyboard.ready():
            begin = time.monotonic()
            try:
                self._keyboard.put(self.pending)
            finally:
                if self._deadline is not None:
                    self._deadline += time.monotonic() - begin

    def _cause_may_follow(self) -> bool:
        """Whether all that is known follows from the loss of a rank, which takes a while to be noticed elsewhere."""
        lost = bool(self._failures) and all(failure.is_consequence() for failure in self._failures)
        return lost and self._ranks.patience > 0 and not self._patient and not self._interrupted

    def _ask_to_leave(self, grace: float, before_abort: float = 0.0) -> None:
        self._leaving, self._grace = True, grace
        self._keyboard.close()
        self._group.leave()
        with self._ranks.together():
            for rank in list(self.pending):
                if self._ranks.pids[rank] is None:  # not even started: nothing of it to wait for
                    self.pending.discard(rank)
                    self._unfit.add(rank)  # it has got the call, and may still begin it
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
        """Let the ranks that are left break off what they wait for in their process groups."""
        if not self._aborted:
            self._aborted = True
            with self._ranks.together():
                for rank in self.pending:
                    self._ranks.abort(rank, self._group.number, self._peers[rank])
            # From here on: many ranks have many connections to be found.
            grace = self._grace if self.pending <= self._begun else max(self._grace, GRACE_TO_BEGIN)
            self._deadline = time.monotonic() + grace

    def _dismiss(self, rank: int) -> None:
        """Let a rank that is done leave the process group: those that wait for it there then notice, and leave too."""
        self._group.send(rank, protocol.Leave(self._peers[rank]))
        self._abort()

    @functools.cached_property
    def _peers(self) -> list[list[Address]]:
        """By rank: the other ends of the connections at which other ranks wait for it."""
        return between(self._ranks.connections())

    def _fail(self, rank: int | None, error: BaseException) -> None:
        self._failures.append(_Failure(rank, error, self._leaving))
        if rank is not None:
            self.pending.discard(rank)
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
                self._give_time_to_tell()
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

    def _give_time_to_tell(self) -> None:
        if self._leaving and self._deadline is not None:
            self._deadline = max(self._deadline, time.monotonic() + GRACE_TO_TELL)

    def _on_finishing(self, rank: int, message: protocol.Finishing) -> None:
        self._give_time_to_tell()
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
        """Copy the big buffers of a rank's answer, which waits for that; or let it send them."""
        pid = self._ranks.pids[rank]
        try:
            if rank in self.pending and pid is not None:
                with contextlib.suppress(OSError, MemoryError):  # the rank then says which
                    self._copied[rank] = rank_memory.copy(pid, buffers)
        finally:  # an interrupt, too, must not leave it waiting
            self._group.send(rank, protocol.Copied(rank in self._copied))

    def _on_exit(self, exit: Exit) -> None:
        if exit.rank in self._unfit:  # as expected
            return
        died = self._group.record_death(exit)
        told = exit.rank in self._answers or any(failure.rank == exit.rank for failure in self._failures)
        if exit.rank in self.pending or not (told or self._leaving):  # also one that only had to join the process group
            self._fail(exit.rank, died)

"""The event loop of a call: answers, output and ends of ranks, interrupts and time, until all ranks have answered."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

from ...deaths import NO_GPU
from ...engines.contract import Exit, Listening
from ...errors import RemoteTraceback
from ...wire import protocol, rank_memory
from ...wire.parcel import Parcel
from ..cell.comms import Page
from . import notices
from .ending import Decision, Ending
from .futures import Stop
from .group import Group
from .hangs import Hangs
from .keyboard import Keyboard
from .leaving import Leaving
from .outcomes import Answers, rebuild
from .stopping import unanswered_stop

#: Seconds from one look at a rank's output to the next: live for an eye, and ranks that print once a batch, or have a
#: progress bar, are spared a kernel that wakes up each time, on a core that they need. The first line after a pause is
#: seen at once.
OUTPUT_INTERVAL = 0.3

#: Seconds for which one waits at a time. Python handles a signal between two steps of its own: one that comes right
#: before a wait, or in another thread, only at the end of that wait.
AT_A_TIME = 1.0


class Waiting:
    """A call, until each of its ranks has answered, failed, died or been given up.

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
        self._group, self._ranks, self._relay = group, group.ranks, group.relay
        self._timeout, self._stop, self._once, self._on_hang = timeout, stop, once, on_hang
        refusal = "" if stop is None else "a call in the background has no cell that could ask"
        self._keyboard = keyboard or Keyboard(group, refusal=refusal)
        self._page = Page(group.relay.comms, foreground=stop is None)
        self.pending = set(targets)
        self.ended = ""
        self._hangs = Hangs(group, self.pending)
        on_gpu = group.layout.devices[0] != "cpu"
        self._ending = Ending(timeout=timeout, on_gpu=on_gpu, patience=group.ranks.patience)
        self._raised: BaseException | None = None  # by the handler of a signal
        self._begun: set[int] = set()
        self._unfit: set[int] = set()  # not waited for any more, and not fit for another call
        self._leaving = Leaving(group, self._ending, self.pending, self._begun, self._unfit)
        self._originals = originals
        self._answers = Answers(originals)
        self._notices = notices.Notices(group)
        for rank in self.pending:
            group.note(rank, "running", what)

    def wait(self, interrupted: bool = False) -> list[Any]:
        """Return the answers by rank, None where no value was asked for.

        Args:
            interrupted: Whether the user has pressed stop already, while the call was sent.

        Raises the failure that came first, `RankTimeout`, `RankStuck` or `KeyboardInterrupt`. When it raises, and no
        rank is `pending` or dead, the ranks can take calls again, in a new process group.
        """
        try:
            self._run(interrupted)
            self.pending |= self._unfit
            self._relay.drain()
            self._relay.flush()
            if self._raised is not None:
                raise self._raised
            if self._ending.interrupted or self._ending.failures:
                raise self._error()
            self._notices.waited(self._ending.elapsed(), self._answers.waited)
            return self._answers.values()
        except KeyboardInterrupt as exc:
            if self.pending and not exc.args and exc.__cause__ is None:  # a press that came between two steps
                raise unanswered_stop(self._ranks, self.pending) from None
            raise
        finally:
            self._page.close()
            self._relay.comms.end_call()
            self._relay.cell.close()
            self._answers.close()

    def _run(self, interrupted: bool) -> None:
        """Handle events until all ranks have answered, or have had their chance."""
        with contextlib.ExitStack() as stack:
            listener: Listening | None = None
            while True:  # again after an interrupt, wherever it comes
                try:
                    if interrupted:
                        self._carry_out(self._ending.interrupt())
                    if listener is None:
                        listener = stack.enter_context(contextlib.closing(self._listen()))
                    while self.pending and not self._ending.given_up:
                        self._step(listener)
                    return
                except BaseException as exc:
                    if not isinstance(exc, KeyboardInterrupt):  # of a handler of SIGALRM, say: a timeout of the user's
                        self._raised = self._raised or exc
                    if self._ending.interrupted:  # a second one: no more patience
                        return
                    interrupted = True

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

    def _step(self, listener: Listening) -> None:
        left = self._ending.left(AT_A_TIME)
        if left <= 0:
            self._carry_out(self._ending.decide())
            return
        if not self._ending.leaving:
            if not self.pending <= self._begun:
                self._notices.late(self._ending.elapsed(), self.pending, self._begun)
            self._look_for_hang()
        listener.select(self._page.soon(self._keyboard.soon(left)))
        self._relay.show_unfinished()
        self._page.look()
        self._ask_user()

    def _look_for_hang(self) -> None:
        found = self._hangs.look(self.pending)
        if found is not None and self._on_hang == "raise":
            self._fail(None, notices.stuck(self._group, self.pending, found))
        elif found is not None:
            self._notices.hang(found)

    def _ask_user(self) -> None:
        """Ask the user for what a rank waits for, if one does."""
        if self._keyboard.ready():
            with self._ending.paused():
                self._keyboard.put(self.pending)

    def _error(self) -> BaseException:
        """Return the exception to raise."""
        failures = self._ending.failures
        if self._ending.interrupted:
            errors = [failure.error for failure in failures if isinstance(failure.error, KeyboardInterrupt)]
            return errors[0] if errors and not self.pending else unanswered_stop(self._ranks, self.pending)
        cause = self._ending.cause()
        if cause.rank in self._group.raised:
            self._group.raised.sort(key=lambda rank: rank != cause.rank)
        return cause.error

    def _fail(self, rank: int | None, error: BaseException) -> None:
        decision = self._ending.fail(rank, error)
        if rank is not None:
            self.pending.discard(rank)
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Decision.ASK_TO_LEAVE:
                self._keyboard.close()
                self._leaving.ask()
            case Decision.ABORT:
                self._leaving.abort()
            case Decision.TIME_OUT:
                self._fail(None, notices.timed_out(self._group, self.pending, self._timeout))

    def _on_stop(self) -> None:
        assert self._stop is not None
        os.read(self._stop.fd, 1)
        raise KeyboardInterrupt

    def _on_message(self, rank: int, message: protocol.FromRank, parcel: Parcel | None) -> None:
        match message:
            case protocol.Notice(text):
                self._relay.cell.notice(text)
            case protocol.Begun():
                self._begun.add(rank)
                if self._ending.leaving and rank in self.pending:
                    self._ranks.signal(rank, signal.SIGINT)
                    self._ending.begun()
            case protocol.Raised():
                self._ending.reporting()
            case protocol.Finishing():
                self._on_finishing(rank, message)
            case protocol.Prompt():
                self._keyboard.ask(rank, message)
            case protocol.Buffers(buffers):
                self._copy(rank, buffers)
            case protocol.Done() | protocol.Error():
                self._on_answer(rank, message, parcel)

    def _on_finishing(self, rank: int, message: protocol.Finishing) -> None:
        self._ending.reporting()
        if self._once:
            self.pending.discard(rank)
            self._unfit.add(rank)
        elif self._ending.interrupted:
            self._notices.finishing(rank, message)

    def _on_answer(self, rank: int, message: protocol.Done | protocol.Error, parcel: Parcel | None) -> None:
        failed = isinstance(message, protocol.Error)
        if rank not in self.pending and (not failed or rank in self._answers or self._ending.leaving):
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
            self._answers.take(rank, message, parcel)
            self._group.note(rank, "idle")
            if not message.grouped:
                self._group.leave()
        if self._ending.leaving:
            self._leaving.dismiss(rank)

    def _copy(self, rank: int, buffers: Sequence[rank_memory.RankBuffer]) -> None:
        """Copy the big buffers of a rank's answer, which waits for that; or let it send them."""
        pid = self._ranks.pids[rank]
        try:
            if rank in self.pending and pid is not None:
                self._answers.copy(rank, pid, buffers)
        finally:  # an interrupt, too, must not leave it waiting
            self._group.send(rank, protocol.Copied(self._answers.has_copied(rank)))

    def _on_exit(self, exit: Exit) -> None:
        if exit.rank in self._unfit:  # as expected
            return
        died = self._group.record_death(exit)
        known = exit.rank in self._answers or any(failure.rank == exit.rank for failure in self._ending.failures)
        # Also the death of a rank that only had to join the process group ends the call.
        if exit.rank in self.pending or not (known or self._ending.leaving):
            self._fail(exit.rank, died)

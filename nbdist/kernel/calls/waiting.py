"""Waiting for the ranks of one call, as an event loop: answers, output, deaths, an interrupt, a timeout."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...deaths import NO_GPU
from ...engines.contract import Exit, Listening
from ...errors import RemoteTraceback
from ...system.interrupts import dropped_exceptions
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
from .stopping import ranks_named, unanswered_stop

#: Seconds between two looks at a rank's output. It looks live, and ranks that print at each batch, or have a progress
#: bar, do not wake the kernel each time, on a core that they need. The first line after a pause is shown at once.
OUTPUT_INTERVAL = 0.3

#: The longest single wait, in seconds. CPython runs signal handlers between bytecodes only, so a signal that comes just
#: before a wait, or in another thread, is noticed when the wait ends.
AT_A_TIME = 1.0

#: Seconds after which a call is long: see `Waiting.when_long`.
LONG = 0.003


class Waiting:
    """The wait for one call, until each of its ranks has answered, failed, died or been given up.

    Attributes:
        pending: The ranks that have not answered. After `wait` has raised: the ranks that did not end the call, or
            cannot take another one.
        ended: The reason why one of the `pending` ranks has ended after its answer; empty if none has.
        when_long: A function that is called once if the call takes longer than `LONG`.
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
        on_hang: str | None = "say",
    ) -> None:
        """
        Args:
            group: The ranks of the session.
            targets: The ranks to which the call was sent.
            what: The name of the function.
            timeout: The longest time of the call, in seconds; None: no limit.
            originals: The objects that were sent by number, as in `capture.Call.originals`.
            stop: The object by which another thread interrupts the call.
            keyboard: The source of lines that ranks ask for. None: the user types them.
            once: Whether the ranks end after the call, so that their state need not be kept usable.
            on_hang: The reaction to ranks that can never go on: "raise" fails with `RankStuck`, "say" shows the reason
                in the cell. None: hangs are not looked for.
        """
        self._group, self._ranks, self._relay = group, group.ranks, group.relay
        self._timeout, self._stop, self._once, self._on_hang = timeout, stop, once, on_hang
        asks = stop is None or group.relay.cell.takes_input
        refusal = "" if asks else "a call in the background has no cell that can ask"
        self._keyboard = keyboard or Keyboard(group, refusal=refusal)
        self._page = Page(group.relay.comms, foreground=stop is None)
        self.pending = set(targets)
        self._ended: dict[int, str] = {}  # the reasons of ranks that end by themselves after their answers
        self.when_long: Callable[[], None] | None = None
        self._hangs = Hangs(group, self.pending)
        on_gpu = group.layout.devices[0] != "cpu"
        self._ending = Ending(timeout=timeout, on_gpu=on_gpu, patience=group.ranks.patience)
        self.takes_interrupts = False
        """True once `wait` passes an interrupt on to the ranks."""
        self._listener: Listening | None = None
        self._begun: set[int] = set()
        self._quiet = contextlib.ExitStack()  # what makes exceptions of signal handlers go, once the call ends
        self._unfit: set[int] = set()  # ranks that are not waited for any more, and cannot take another call
        self._leaving = Leaving(group, self._ending, self.pending, self._begun, self._unfit)
        self._originals = originals
        self._answers = Answers(originals)
        self._notices = notices.Notices(group)
        for rank in self.pending:
            group.note(rank, "running", what)

    def wait(self, raised: BaseException | None = None) -> list[Any]:
        """Wait for all ranks, and return their values in the order of the ranks; None for a rank that returns none.

        Args:
            raised: An interrupt, or another exception of a signal handler, that was raised before the wait.

        Raises the first failure, `RankTimeout`, `RankStuck` or `KeyboardInterrupt`. If no rank is `pending` or dead
        afterwards, the ranks can take calls again, in a new process group.
        """
        interrupted = raised is not None
        try:
            while True:  # once more after an interrupt, which may come anywhere in the block
                try:
                    self.takes_interrupts = True
                    self._run(interrupted)
                    break
                except BaseException as exc:
                    interrupted = True
                    if raised is None or isinstance(raised, KeyboardInterrupt):
                        raised = exc
                    if self._ending.interrupted:  # the second interrupt ends the wait at once
                        break
            self.pending |= self._unfit
            self._relay.drain()
            self._relay.flush()
            if raised is not None and not isinstance(raised, KeyboardInterrupt):
                raise raised  # from the user's signal handler, such as for SIGALRM
            if self._ending.interrupted or self._ending.failures:
                raise self._error()
            self._notices.waited(self._ending.elapsed(), self._answers.waited)
            return self._answers.values()
        except KeyboardInterrupt as exc:
            if self.pending and not exc.args and exc.__cause__ is None:  # an interrupt between two steps
                raise self._unanswered() from None
            raise
        finally:
            if self._listener is not None:
                self._listener.close()
                self._listener = None  # whose callbacks hold this object, and so the ranks
            self._page.close()
            self._relay.comms.end_call()
            self._relay.cell.close()
            self._answers.close()
            self._quiet.close()

    def _run(self, interrupted: bool) -> None:
        """Handle events until all ranks have answered, or their time to end the call is over."""
        if interrupted:
            self._quiet.enter_context(dropped_exceptions())
            self._carry_out(self._ending.interrupt())
        if self._listener is None:
            self._listener = self._listen()
        while self.pending and not self._ending.given_up:
            self._step(self._listener)

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
            if self._on_hang is not None:
                self._look_for_hang()
        if self.when_long is not None:
            left = min(left, self._until_long())
        listener.select(self._page.soon(self._keyboard.soon(left)))
        self._relay.show_unfinished()
        self._page.look()
        self._ask_user()

    def _until_long(self) -> float:
        """Return the seconds until the call is long; once it is, call `when_long`."""
        left = LONG - self._ending.elapsed()
        if left <= 0 and self.when_long is not None:
            action, self.when_long = self.when_long, None
            action()
            return AT_A_TIME
        return left

    def _look_for_hang(self) -> None:
        """Show once why the ranks can never go on, or fail with this reason."""
        found = self._hangs.look(self.pending)
        if found is not None and self._on_hang == "raise":
            self._fail(None, notices.stuck(self._group, self.pending, found))
        elif found is not None:
            self._notices.hang(found)

    def _ask_user(self) -> None:
        """Ask the user for a line if a rank waits for one."""
        if self._keyboard.ready():
            with self._ending.paused():
                self._keyboard.put(self.pending)

    def _error(self) -> BaseException:
        """Return the exception to raise."""
        failures = self._ending.failures
        if self._ending.interrupted:
            errors = [failure.error for failure in failures if isinstance(failure.error, KeyboardInterrupt)]
            return errors[0] if errors and not self.pending else self._unanswered()
        cause = self._ending.cause()
        if cause.rank in self._group.raised:
            self._group.raised.sort(key=lambda rank: rank != cause.rank)
        return cause.error

    def _unanswered(self) -> KeyboardInterrupt:
        return unanswered_stop(self._ranks, self.pending, self._unstarted(), self._ended)

    def _unstarted(self) -> set[int]:
        return self._leaving.unstarted | {rank for rank in self.pending if self._ranks.pids[rank] is None}

    def why_lost(self) -> str:
        """Return the reason why the ranks cannot take another call, after a call that has left some `pending`."""
        if self._ended:
            rank, why = next(iter(self._ended.items()))
            return f"rank {rank} {why}"
        if self.pending <= self._unstarted():
            return f"the last call was stopped before {ranks_named(self.pending)} had started"
        return f"{ranks_named(self.pending)} did not leave the last call"

    def _fail(self, rank: int | None, error: BaseException, lives: bool = False) -> None:
        """Record a failure of a rank, or of the call as a whole; `lives`: the rank is still in its process group."""
        self._leaving.incomplete |= not lives
        decision = self._ending.fail(rank, error)
        if rank is not None:
            self.pending.discard(rank)
            self._notices.failed(rank, error)
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
                    self._leaving.begun()
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
                self._ended[rank] = message.ends
            self._group.note(rank, "raised")
            self._group.raised.append(rank)
            error = rebuild(rank, self._ranks.pids[rank], message, parcel, self._originals)
            if isinstance(error.__cause__, RemoteTraceback):
                error.__cause__.hints += self._group.explain_gpu_error(rank, error, lost=message.ends == NO_GPU)
            self._fail(rank, error, lives=rank in self._begun and not message.ends)
        else:
            self.pending.discard(rank)
            self._answers.take(rank, message, parcel)
            self._group.note(rank, "idle")
            if not message.grouped:
                self._group.leave()
        if self._ending.leaving:
            self._leaving.dismiss(rank)

    def _copy(self, rank: int, buffers: Sequence[rank_memory.RankBuffer]) -> None:
        """Copy the big buffers of a rank's answer out of its memory, and report to the rank whether that worked.

        The rank waits for the report. It sends the buffers itself if they could not be copied.
        """
        pid = self._ranks.pids[rank]
        try:
            if rank in self.pending and pid is not None:
                self._answers.copy(rank, pid, buffers)
        finally:  # the rank waits for the report after an interrupt, too
            self._group.send(rank, protocol.Copied(self._answers.has_copied(rank)))

    def _on_exit(self, exit: Exit) -> None:
        if exit.rank in self._unfit:  # as expected
            return
        died = self._group.record_death(exit)
        known = exit.rank in self._answers or any(failure.rank == exit.rank for failure in self._ending.failures)
        # The death of a rank that only joined the process group ends the call, too.
        if exit.rank in self.pending or not (known or self._ending.leaving):
            self._fail(exit.rank, died)
            self._leaving.go_on()

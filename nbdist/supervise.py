"""Waiting for ranks: their answers, their output, their deaths, an interrupt, a timeout; the first failure ends all."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import lending, pickling, stacks, transport
from .errors import CaptureError, NbdistError, RankTimeout, RemoteTraceback, render
from .futures import Stop
from .group import Group

#: Seconds that the other ranks get to leave by themselves after the first failure: enough to tell their own errors.
GRACE_AFTER_FAILURE = 0.8
#: Seconds that a rank which has raised gets to tell what: a traceback with its source takes a while to render.
GRACE_TO_TELL = 5.0
#: Seconds that ranks get to clean up after an interrupt of the cell.
GRACE_AFTER_INTERRUPT = 5.0

#: Seconds from one look at a rank's output to the next: live for an eye, and ranks that print once a batch, or have a
#: progress bar, are spared a kernel that wakes up each time, on a core that they need. The first line after a pause is
#: seen at once.
OUTPUT_INTERVAL = 0.3

#: What a rank says when a peer has gone: a consequence, and not the cause of a failure.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by peer|socket closed", re.I
)


@dataclass
class _Failure:
    rank: int | None
    error: BaseException

    def is_consequence(self) -> bool:
        """Whether the failure only follows from that of another rank: it was asked to leave, or lost its peer."""
        lost_peer = isinstance(self.error, (RuntimeError, OSError)) and bool(_LOST_PEER.search(str(self.error)))
        return lost_peer or isinstance(self.error, KeyboardInterrupt)


class Waiting:
    """One call being waited for, until each of its ranks has answered, failed, died or been given up.

    Attributes: `pending`, the ranks that have not answered; after `wait` has raised, those that would not leave.
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
        prompt: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            group: Whose ranks have got the call.
            targets: The ranks that have.
            what: The name of what they run.
            timeout: Seconds that they may take.
            originals: What was sent by number, as `capture.Call.originals` has it.
            stop: Lets another thread interrupt the call.
            prompt: Gives the line that a rank's debugger asks for.
        """
        self._group, self._ranks, self._relay = group, group.ranks, group.relay
        self._timeout, self._originals, self._stop, self._prompt = timeout, originals, stop, prompt
        self.pending = set(targets)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._leaving = False  # the ranks were asked to leave: what they do then is no failure of theirs
        self._given_up = False
        self._patient = False  # the loss of a rank was waited for
        self._paused: list[int] = []  # outputs that were just read
        self._resume_at = 0.0
        self._silent: set[int] = set()  # ranks whose channel is closed
        self._answers: dict[int, transport.Parcel | None] = {}
        self._lent: dict[int, list[memoryview]] = {}
        self._failures: list[_Failure] = []
        for rank in self.pending:
            group.note(rank, "running", what)

    def wait(self) -> list[Any]:
        """The answers by rank, None where no value was asked for.

        Raises the failure that came first, `RankTimeout`, or `KeyboardInterrupt`. When it raises, and no rank is
        `pending` or dead, the ranks can take calls again, in a new process group.
        """
        interrupted = False
        try:
            with selectors.DefaultSelector() as self._selector:
                self._register()
                while self.pending and not self._given_up:
                    try:
                        self._step()
                    except KeyboardInterrupt:
                        if interrupted:  # a second one: no more patience
                            raise
                        interrupted = True
                        self._ask_to_leave(GRACE_AFTER_INTERRUPT)
            self._relay.drain()
            self._relay.flush()
            if interrupted or self._failures:
                raise self._failure(interrupted)
            answers = [self._answers[rank] for rank in sorted(self._answers)]
            try:
                return [None if parcel is None else load(parcel, self._originals) for parcel in answers]
            except Exception as exc:
                raise CaptureError(
                    f"the function returned, but its value cannot be rebuilt here ({type(exc).__name__}: {exc})"
                ) from exc
        finally:
            self._relay.cell.close()
            for parcel in self._answers.values():
                if parcel is not None:
                    parcel.close()

    def _failure(self, interrupted: bool) -> BaseException:
        """The exception to raise: the root cause, with the other ranks' failures listed under it."""
        if interrupted:
            errors = [f.error for f in self._failures if isinstance(f.error, KeyboardInterrupt)]
            return errors[0] if errors else KeyboardInterrupt()
        first, *others = sorted(self._failures, key=_Failure.is_consequence)
        if first.rank in self._group.raised:
            self._group.raised.sort(key=lambda rank: rank != first.rank)
        if isinstance(first.error.__cause__, RemoteTraceback):
            first.error.__cause__.others = [
                f"also failed: rank {other.rank}: {type(other.error).__name__}: {other.error}".splitlines()[0]
                for other in others
                if not other.is_consequence()
            ]
        return first.error

    def _register(self) -> None:
        self._paused = list(self._relay.descriptors())
        self._resume()
        for rank, channel in enumerate(self._ranks.channels):
            self._selector.register(channel, selectors.EVENT_READ, functools.partial(self._on_message, rank))
        self._selector.register(self._ranks.exits_fd, selectors.EVENT_READ, self._on_exits)
        if self._stop is not None:
            self._selector.register(self._stop.fd, selectors.EVENT_READ, self._on_stop)

    def _on_stop(self) -> None:
        assert self._stop is not None
        os.read(self._stop.fd, 1)
        raise KeyboardInterrupt

    def _step(self) -> None:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is None or left > 0:
            if self._paused:
                wait = max(0.0, self._resume_at - time.monotonic())
                left = wait if left is None else min(left, wait)
            for key, _ in self._selector.select(left):
                key.data()
            if self._paused and time.monotonic() >= self._resume_at:
                self._resume()
        elif self._leaving and self._cause_may_follow():
            self._patient, self._deadline = True, time.monotonic() + self._ranks.patience
        elif self._leaving:  # they had their chance
            self._given_up = True
        else:
            where = stacks.take(self._ranks, self.pending)
            self._fail(None, RankTimeout(f"not done after {self._timeout:g} s: {stacks.report(where)}"))

    def _cause_may_follow(self) -> bool:
        """Whether all that is known follows from the loss of a rank, which takes a while to be noticed elsewhere."""
        lost = bool(self._failures) and all(failure.is_consequence() for failure in self._failures)
        return lost and self._ranks.patience > 0 and not self._patient

    def _ask_to_leave(self, grace: float) -> None:
        self._leaving = True
        self._group.leave()
        self._deadline = time.monotonic() + grace
        for rank in range(len(self._ranks.channels)):
            if rank not in self.pending:
                self._dismiss(rank)
            elif self._ranks.pids[rank] is None:  # not even started: nothing of it to wait for
                self.pending.discard(rank)
            else:
                self._ranks.signal(rank, signal.SIGINT)

    def _dismiss(self, rank: int) -> None:
        """Let a rank that is done leave the process group: those that wait for it there then notice, and leave too."""
        self._group.send(rank, "leave", self._addresses)

    @functools.cached_property
    def _addresses(self) -> list[tuple[str, int]]:
        """The ends of the connections that ranks wait at."""
        return self._ranks.addresses()

    def _fail(self, rank: int | None, error: BaseException) -> None:
        self._failures.append(_Failure(rank, error))
        if rank is not None:
            self.pending.discard(rank)
        if not self._leaving:
            self._ask_to_leave(GRACE_AFTER_FAILURE)

    def _on_output(self, fd: int) -> None:
        if not self._paused:
            self._resume_at = time.monotonic() + OUTPUT_INTERVAL
        self._paused.append(fd)  # first of all: an interrupt may come between any two of these lines
        self._selector.unregister(fd)
        if not self._relay.read(fd):
            self._paused.remove(fd)

    def _resume(self) -> None:
        for fd in self._paused:
            with contextlib.suppress(KeyError):  # it never was taken out
                self._selector.register(fd, selectors.EVENT_READ, functools.partial(self._on_output, fd))
        self._paused.clear()

    def _on_message(self, rank: int) -> None:
        channel = self._ranks.channels[rank]
        if rank in self._silent or not transport.readable(channel):  # it was read since this was found readable
            return
        try:
            message, parcel, _ = channel.receive()
        except (EOFError, ConnectionError):  # how the rank ended, its exit will tell
            self._selector.unregister(channel)
            self._silent.add(rank)
            return
        self._relay.drain(rank)  # what it wrote before it answered comes before what the cell does next
        if message[0] == "begun":
            if self._leaving and rank in self.pending:
                self._ranks.signal(rank, signal.SIGINT)
            return
        if message[0] == "raised":
            if self._leaving and self._deadline is not None:
                self._deadline = max(self._deadline, time.monotonic() + GRACE_TO_TELL)
            return
        if message[0] == "prompt" and self._prompt is not None:
            self._group.send(rank, "line", "quit" if self._leaving else self._prompt())
            return
        if message[0] == "lent":
            self._take(rank, message[1])
            return
        if rank not in self.pending:  # given up already
            if parcel is not None:
                parcel.close()
        elif message[0] == "error":
            _, text, rendered, spare = message
            self._group.note(rank, "raised")
            self._group.raised.append(rank)
            self._fail(rank, self._rebuild(rank, text, rendered, spare, parcel))
        else:
            self.pending.discard(rank)
            self._answers[rank] = parcel
            if parcel is not None:
                parcel.lent = self._lent.pop(rank, [])
            self._group.note(rank, "idle")
            if not message[1]:
                self._group.leave()
        if self._leaving:
            self._dismiss(rank)

    def _take(self, rank: int, loans: list[lending.Loan]) -> None:
        """Copy the big buffers of a rank's answer, which waits for that; or let it send them."""
        pid = self._ranks.pids[rank]
        try:
            if rank in self.pending and pid is not None:
                with contextlib.suppress(OSError):
                    self._lent[rank] = lending.fetch(pid, [lending.Loan(*loan) for loan in loans])
        finally:  # an interrupt, too, must not leave it waiting
            self._group.send(rank, "taken", rank in self._lent)

    def _rebuild(
        self, rank: int, text: str, rendered: list[str], spare: list[bytes], parcel: transport.Parcel | None
    ) -> BaseException:
        error = rebuild(parcel, spare, self._originals)
        error.__cause__ = RemoteTraceback(rank, self._ranks.pids[rank], text, rendered)
        with contextlib.suppress(AttributeError):  # a class with slots; then IPython shows its cause and our frames
            error._render_traceback_ = functools.partial(render, error)  # type: ignore[attr-defined]
        return error

    def _on_exits(self) -> None:
        for exit in self._ranks.exits():
            # It may have answered before it ended.
            while exit.rank in self.pending - self._silent and transport.readable(self._ranks.channels[exit.rank]):
                self._on_message(exit.rank)
            died = self._group.bury(exit)
            if exit.rank in self.pending:
                self._fail(exit.rank, died)


def load(parcel: transport.Parcel, originals: Sequence[Any]) -> Any:
    """The object in a rank's parcel; the notebook's own functions and classes are the very ones that were sent."""
    pickled, buffers = parcel.open()
    return pickling.read(
        pickled,
        buffers,
        originals=originals,
        # What a returned function uses is added to the notebook, but nothing there is overwritten.
        keep=lambda key, namespace, name: name not in namespace,
    )


def rebuild(parcel: transport.Parcel | None, spare: Sequence[bytes], originals: Sequence[Any]) -> BaseException:
    """The exception that a rank raised, or the nearest that this process can make."""
    candidates = [] if parcel is None else [functools.partial(load, parcel, originals)]
    for make in [*candidates, *(functools.partial(pickle.loads, pickled) for pickled in spare)]:
        try:
            error = make()
        except Exception:  # its class or its content makes sense in the rank only
            continue
        if isinstance(error, BaseException):
            return error
    return NbdistError("a rank raised an exception that cannot be rebuilt here")

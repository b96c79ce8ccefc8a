"""The actions of a keeper's ranks: calls, and other actions that are done in turn with calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..capture.call import Call
from ..errors import RemoteTraceback, text_of
from ..kernel.calls.executor import Request
from ..kernel.calls.futures import FairLock, Stop, Ticket
from ..kernel.calls.outcomes import Unread, UnreadOutcome
from ..kernel.named.spec import Action, Answer
from ..notebook.shell import label_cells
from ..wire.journal import Record
from ..wire.parcel import Parcel
from .executor import JournalCell, KeptExecutor
from .held import HeldValues
from .wakeups import Wakeups
from .writing import Journal

#: Bytes of a call that the journal keeps, so that another process can read values that refer to what came with it.
_CALL_KEPT = 16 << 20


#: Bytes of values that a client gets before they are in the journal.
_ANSWER = 16 << 10


class _Turn:
    """An action that waits for its turn, or runs."""

    def __init__(
        self,
        token: str,
        action: Action,
        parcel: Parcel,
        cell: JournalCell,
        ticket: Ticket,
        will_wait: Callable[[], None],
        wakeup: str,
    ) -> None:
        self.token, self.action, self.parcel, self.cell, self.ticket = token, action, parcel, cell, ticket
        self.will_wait, self.wakeup = will_wait, wakeup
        self.stop: Stop | None = None
        """The means to stop the action while it runs."""
        self.dropped = False
        """True if the action was stopped before it had begun."""


class Actions:
    """The queue of a keeper's actions: the keeper runs one at a time, and writes its events to the journal.

    Attributes:
        lock: The lock that an action holds while it runs.
        running: The token and the name of the current action.
        held: The values for which the disk had no room.
        last: The number of the last call.
        taken: Whether a client has taken the outcome of the last call.
        used: The time at which the last action ended.
        present: The tokens of actions whose clients are connected.
    """

    def __init__(self, executor: KeptExecutor, journal: Journal, wakeups: Wakeups) -> None:
        self._executor, self._journal, self._wakeups = executor, journal, wakeups
        self.lock = FairLock()
        self._turns: dict[str, _Turn] = {}  # by token
        self._stop: Stop | None = None  # for the next action: a new one is made after it was used
        self._stopping = threading.RLock()
        self._numbers = itertools.count(1)
        self._calls = 0
        self.running = "", ""
        self.held = HeldValues(journal.keep)
        self.last, self.taken = 0, True
        self._token = ""  # of the last call
        self.used = time.monotonic()
        self.present: set[str] = set()

    def queue(
        self, token: str, action: Action, parcel: Parcel | None, will_wait: Callable[[], None], wakeup: str = ""
    ) -> Callable[[], None]:
        """Put an action into the queue, and return a function that waits for its turn and then runs it.

        Only a call has a `parcel`. `will_wait` is called before the first wait that may take long. `wakeup` is the name
        of the connection on which the client waits.
        """
        cell = JournalCell(self._journal, action.asks, will_wait)
        turn = _Turn(token, action, parcel or Parcel(b"", [], []), cell, self.lock.draw(), will_wait, wakeup)
        self._turns[token] = turn
        # Only now: another client may have drawn a ticket before this one, and the thread that reads on may get a
        # request to stop this action, or the client's next action.
        if not self.lock.is_first(turn.ticket) or action.kind != "call":
            will_wait()
        return functools.partial(self._take, turn)

    def _take(self, turn: _Turn) -> None:
        with contextlib.closing(turn.parcel):
            self.lock.in_turn(functools.partial(self._begin, turn), turn.ticket)

    def _begin(self, turn: _Turn) -> None:
        with self._stopping:
            if turn.dropped:
                return
            turn.stop = self._stop = self._stop or Stop()
        self._executor.will_wait = turn.will_wait
        try:
            self._do(turn, turn.stop)
        finally:
            self._turns.pop(turn.token, None)
            with self._stopping:
                stop, turn.stop = turn.stop, None
            if stop is not self._stop:
                stop.close()

    def busy(self) -> bool:
        """Return whether an action runs or waits for its turn. An action whose outcome is being written is over."""
        return bool(self._turns)

    def stop(self, token: str) -> None:
        """Interrupt an action. If it has not begun, it never will."""
        turn = self._turns.get(token)
        if turn is None:
            return
        with self._stopping:
            if turn.cell.answer(KeyboardInterrupt()):
                return
            if turn.stop is not None:
                turn.stop.ask()
                self._stop = None
            elif self._turns.pop(token, None) is not None:  # it has not begun, and never will
                turn.dropped = True
                number = next(self._numbers)
                self._note_begin(number, token, turn.action._replace(kind="stopped"), Parcel(b"", [], []))
                self._note_error(number, KeyboardInterrupt("stopped before any rank had got the call: nothing is lost"))

    def stop_all(self) -> None:
        """Interrupt all actions."""
        for token in list(self._turns):
            self.stop(token)

    def answer(self, token: str, line: str | None) -> None:
        """Pass on a line that the user has typed. None: no more lines can be typed."""
        turn = self._turns.get(token)
        if turn is not None:
            turn.cell.answer(line)

    def look(self) -> None:
        """Count the outcome of the last call as taken if its client is still connected one second after the call."""
        if not self.taken and not self.lock.busy() and time.monotonic() > self.used + 1.0:
            self.taken = self._token in self.present

    def take(self, call: int) -> None:
        """Record that a client has taken the outcome of a call."""
        self.taken = self.taken or call == self.last

    def leave_alone(self, token: str) -> None:
        """Record that the client of an action is gone, so that no lines can be typed for it."""
        turn = self._turns.get(token)
        if turn is not None:
            turn.cell.leave_alone()

    def _do(self, turn: _Turn, stop: Stop) -> None:
        number, token, action = next(self._numbers), turn.token, turn.action
        turn.cell.call = number
        self.running = token, action.what
        if action.kind == "call":
            self._calls, self.last, self.taken, self._token = self._calls + 1, number, False, token
            self.held.drop()
        self._note_begin(number, token, action, turn.parcel)
        try:
            try:
                values = self._carry_out(turn, stop)
            finally:  # before the client learns of the end: its next question is whether the session is busy
                self._turns.pop(token, None)
            self._finish(number, turn, values)
        except BaseException as exc:
            self._note_error(number, exc)
        finally:
            self.running, self.used = ("", ""), time.monotonic()

    def _finish(self, number: int, turn: _Turn, values: Sequence[tuple[int, UnreadOutcome]]) -> None:
        """Write the values and the end of an action to the journal. If the journal has nothing of the action yet, its
        client gets small values first, because a short call would take a tenth longer otherwise.
        """
        small, answered = _small(values), False
        # A client that has its answer finds it in the journal, too. Big values take long to write.
        with contextlib.nullcontext() if small is None else self._journal.lock:
            if small is not None and self._journal.holds_back():
                answered = self._wakeups.answer(turn.wakeup, Answer(turn.token, small))
            for rank, value in values:
                assert value.pickled is not None
                if not self._journal.keep_value(number, rank, value.pickled, value.views):
                    self.held.put(number, rank, value)
            self._journal.append("end", {"call": number, "state": "returned", "time": time.time()}, wake=False)
        self._wakeups.wake(but=turn.wakeup if answered else "")

    def _carry_out(self, turn: _Turn, stop: Stop) -> list[tuple[int, UnreadOutcome]]:
        action, cell = turn.action, turn.cell
        if action.kind != "call":
            others: dict[str, Callable[..., None]] = {
                "debug": functools.partial(self._executor.debug, stop=stop),
                "widget": self._executor.deliver_widget_event,
                "empty_cache": self._executor.empty_cache,
                "restart": self._executor.restart,
            }
            others[action.kind](*action.values, cell=cell)
            return []
        label_cells(action.cells)
        call = Call(action.header, action.cells, turn.parcel, Unread(), set(), set())
        request = Request(call, action.seeds, action.targets, action.everyone, "none", None, action.what, action.once)
        values = self._executor.carry_out(request, cell, stop)
        ranks = action.targets or range(len(values))
        return [(rank, value) for rank, value in zip(ranks, values, strict=False) if value is not None]

    def _note_begin(self, number: int, token: str, action: Action, parcel: Parcel) -> None:
        head = {"call": number, "number": self._calls, "token": token, "time": time.time(), **self._executor.ranks()}
        self._journal.append_soon(lambda: Record("begin", {**head, **_described(action)}, _kept(action, parcel)))

    def _note_error(self, number: int, exc: BaseException) -> None:
        head: dict[str, Any] = {"call": number, "type": type(exc).__name__, "text": text_of(exc)}
        head["held"] = self._executor.raised()
        buffers: list[bytes | memoryview] = []
        remote = exc.__cause__
        if isinstance(remote, RemoteTraceback) and isinstance(remote.unread, UnreadOutcome):
            unread = remote.unread
            head |= {"rank": remote.rank, "pid": remote.pid, "plain": remote.text, "rendered": remote.rendered}
            head |= {"others": remote.others, "hints": remote.hints, "inside": remote.inside}
            head["spare"] = len(unread.spare)
            buffers = [*unread.spare, *([] if unread.pickled is None else [unread.pickled, *unread.views])]
        else:
            exc.__cause__ = exc.__context__ = exc.__traceback__ = None
            with contextlib.suppress(Exception):
                buffers = [pickle.dumps(exc)]
        self._journal.append("raised", head, *buffers, wake=False)
        self._journal.append("end", {"call": number, "state": "raised", "time": time.time()})


def _small(values: Sequence[tuple[int, UnreadOutcome]]) -> list[tuple[int, bytes]] | None:
    """Return the pickles of values for an `Answer`; None if they are too big for one."""
    parts = [value.pickled for _, value in values if value.pickled is not None and not value.views]
    if len(parts) < len(values) or sum(part.nbytes for part in parts) > _ANSWER:
        return None
    return [(rank, bytes(part)) for (rank, _), part in zip(values, parts, strict=True)]


def _described(action: Action) -> dict[str, Any]:
    """Return the part of the head of an action's first record that says what the action is."""
    head = {"action": action.kind, "what": action.what, "output": action.output, "lines": action.lines}
    first = action.targets[0] if action.targets else 0
    return {**head, "everyone": action.everyone, "originals": action.originals, "first": first}


def _kept(action: Action, parcel: Parcel) -> list[bytes]:
    """Return the buffers of an action's first record: the pickle and the buffers of a call that is not too big."""
    if not action.originals or parcel.size > _CALL_KEPT:
        return []
    inline = [] if parcel.inline is None else [parcel.inline]
    return inline + [os.pread(parcel.segments[span.segment].fd, span.size, span.start) for span in parcel.spans]

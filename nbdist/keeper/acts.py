"""The acts of a keeper's ranks: calls, and the other things that take turns with calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from typing import Any

from ..capture.call import Call
from ..errors import RemoteTraceback, text_of
from ..kernel.calls.executor import Request
from ..kernel.calls.futures import CallFuture, FairLock, Stop, in_background
from ..kernel.calls.outcomes import Unread, UnreadOutcome
from ..kernel.named.spec import Act
from ..notebook.shell import label_cells
from ..wire.parcel import Parcel
from .executor import JournalCell, KeptExecutor
from .writing import Journal

#: Bytes of a call that the journal keeps, so that another process can read values that refer to what came with it.
_CALL_KEPT = 16 << 20


class Acts:
    """Carries out acts, one at a time, and notes in the journal what becomes of them.

    Attributes: `lock`, whose turns they have. `running`, the token and the name of the one that runs. `held`, values
    that the disk had no room for, by act and rank. `last`, the number of the last call; `taken`, whether somebody has
    taken its outcome. `used`, when the last one was over.
    """

    def __init__(self, executor: KeptExecutor, journal: Journal) -> None:
        self._executor, self._journal = executor, journal
        self.lock = FairLock()
        self._futures: dict[str, CallFuture[Any]] = {}
        self._cells: dict[str, JournalCell] = {}
        self._numbers = itertools.count(1)
        self._calls = 0
        self.running = "", ""
        self.held: dict[tuple[int, int], UnreadOutcome] = {}
        self.last, self.taken = 0, True
        self._token = ""  # of the last call
        self.used = time.monotonic()

    def begin(self, token: str, act: Act, parcel: Parcel | None) -> None:
        """Have an act done when its turn comes. Only a call has a `parcel`."""
        self._cells[token] = JournalCell(self._journal, asks=act.asks)
        parcel = parcel or Parcel(b"", [], [])
        future: CallFuture[Any] = in_background(
            functools.partial(self._do, token, act, parcel), parcel, self.lock, act.what
        )
        self._futures[token] = future
        future.add_done_callback(functools.partial(self._done, token, act))

    def _done(self, token: str, act: Act, future: Future[Any]) -> None:
        self._futures.pop(token, None)
        if self._cells.pop(token, None) is not None:  # it was stopped before it had begun
            number = next(self._numbers)
            self._note_begin(number, token, act._replace(kind="stopped"), Parcel(b"", [], []))
            self._note_error(number, KeyboardInterrupt("stopped before any rank had got the call: nothing is lost"))

    def stop(self, token: str) -> None:
        """Interrupt an act, or have it not begin."""
        cell, future = self._cells.get(token), self._futures.get(token)
        if cell is not None and cell.asking:
            cell.answers.put(KeyboardInterrupt())
        elif future is not None:
            future.cancel()

    def stop_all(self) -> None:
        """Interrupt all acts."""
        for token in list(self._futures):
            self.stop(token)

    def answer(self, token: str, line: str | None) -> None:
        """Pass on what was typed; None: nothing can be typed any more."""
        cell = self._cells.get(token)
        if cell is not None and cell.asking:
            cell.answers.put(line)

    def look(self, present: Container[str]) -> None:
        """Count an outcome as taken when the client of the last call is there a second after that."""
        if not self.taken and not self.lock.busy() and time.monotonic() > self.used + 1.0:
            self.taken = self._token in present

    def leave_alone(self, token: str) -> None:
        """The client that has asked for an act is gone: nothing can be typed for it."""
        cell = self._cells.get(token)
        if cell is not None:
            cell.takes_input = False
            self.answer(token, None)

    def _do(self, token: str, act: Act, parcel: Parcel, stop: Stop) -> None:
        number, cell = next(self._numbers), self._cells[token]
        cell.call = number
        self.running = token, act.what
        if act.kind == "call":
            self._calls, self.last, self.taken, self._token = self._calls + 1, number, False, token
            self.held.clear()
        self._note_begin(number, token, act, parcel)
        try:
            values = self._carry_out(act, parcel, cell, stop)
            for rank, value in values:
                assert value.pickled is not None
                if not self._journal.keep_value(number, rank, value.pickled, value.views):
                    self.held[number, rank] = value
        except BaseException as exc:
            self._note_error(number, exc)
        else:
            self._journal.append("end", {"call": number, "state": "returned", "time": time.time()})
        finally:
            self.running, self.used = ("", ""), time.monotonic()
            self._cells.pop(token, None)

    def _carry_out(self, act: Act, parcel: Parcel, cell: JournalCell, stop: Stop) -> list[tuple[int, UnreadOutcome]]:
        others: dict[str, Callable[..., None]] = {
            "debug": functools.partial(self._executor.debug, stop=stop),
            "widget": self._executor.deliver_widget_event,
            "empty_cache": self._executor.empty_cache,
            "restart": self._executor.restart,
        }
        if act.kind != "call":
            others[act.kind](*act.values, cell=cell)
            return []
        assert act.header is not None
        label_cells(act.header.cells)
        call = Call(act.header, parcel, Unread(), set(), set())
        request = Request(call, act.seeds, act.targets, act.everyone, "none", None, act.what, act.once)
        values = self._executor.carry_out(request, cell, stop)
        ranks = act.targets or range(len(values))
        return [(rank, value) for rank, value in zip(ranks, values, strict=False) if value is not None]

    def _note_begin(self, number: int, token: str, act: Act, parcel: Parcel) -> None:
        head = {"call": number, "number": self._calls, "token": token, "act": act.kind, "what": act.what}
        head |= {"time": time.time(), "output": act.output, "lines": act.lines, "everyone": act.everyone}
        head |= {"originals": act.originals, "first": act.targets[0] if act.targets else 0, **self._executor.ranks()}
        buffers: list[bytes] = []
        if act.originals and parcel.size <= _CALL_KEPT:
            buffers = [] if parcel.inline is None else [parcel.inline]
            buffers += [os.pread(parcel.segments[span.segment].fd, span.size, span.start) for span in parcel.spans]
        self._journal.append("begin", head, *buffers, ring=False)

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
        self._journal.append("raised", head, *buffers, ring=False)
        self._journal.append("end", {"call": number, "state": "raised", "time": time.time()})

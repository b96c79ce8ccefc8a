"""The replay of a named session's journal in a cell: output is shown as if the ranks wrote it now."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...system.interrupts import deferred_interrupts, interruptible
from ...wire.journal import Reader, Record
from ..calls.futures import Stop
from ..calls.waiting import AT_A_TIME
from ..cell.cell import Cell
from ..cell.comms import Page
from ..cell.relay import Relay
from .connection import Wakeup
from .spec import Answer


class _Ranks:
    """The ranks of a keeper, with the attributes that a relay needs."""

    def __init__(
        self, count: int, deliver_widget_event: Callable[[int, dict[str, Any], Sequence[bytes]], bool]
    ) -> None:
        self.pids: list[int | None] = [None] * count
        self.deliver_widget_event = deliver_widget_event

    def drain(self, rank: int, on_output: Any) -> None:
        """Do nothing: the journal has all output of a rank."""


class Relays:
    """The relays through which the journal is shown: a new one for each group of ranks, because each group has its own
    widgets.

    Attributes: `relay`, the relay of the last group; `ranks`, the number of its ranks.

    Args:
        deliver_widget_event: The function that passes on a change of a widget in the page, like
            `Ranks.deliver_widget_event`.
        between: The argument `between` of `Comms`.
    """

    def __init__(self, deliver_widget_event: Callable[..., bool], between: Callable[[], Any]) -> None:
        self._deliver_widget_event, self._between = deliver_widget_event, between
        self._group = self.ranks = 0
        self.relay: Relay | None = None

    def enter(self, head: Any) -> bool:
        """Use a relay for the ranks that a record names; return whether it is a new one."""
        if not head["ranks"] or head["group"] == self._group:
            return False
        self._group, self.ranks = head["group"], head["ranks"]
        self.close()
        self.relay = Relay(_Ranks(head["ranks"], self._deliver_widget_event))  # type: ignore[arg-type]
        self.relay.comms.between = self._between
        return True

    def close(self) -> None:
        """Replace the widgets of ranks that have ended by pictures."""
        if self.relay is not None:
            self.relay.comms.close()


class Replayer:
    """A call, or another action, in a journal, whose records are shown in a cell up to its end.

    Attributes: `head`, the head of its first record; None before this record was read. `buffers`, the buffers of that
    record. `values`, the records of the ranks' values. `raised`, the record of its exception. `over`, whether its end
    was read.

    Args:
        relays: The relays to show it with.
        reader: The reader of the journal, at a position before the first record of the action.
        cell: The cell that shows the output. None: no output is shown.
        is_own: A function that returns whether the head of a "begin" record belongs to this action.
        output, lines: The options of `Session`, in place of the options of the call.
    """

    def __init__(
        self,
        relays: Relays,
        reader: Reader,
        cell: Cell | None,
        is_own: Callable[[Any], bool],
        output: str | None = None,
        lines: int | str | None = "as made",
    ) -> None:
        self._relays, self._reader, self._cell, self._is_own = relays, reader, cell, is_own
        self._output, self._lines = output, lines
        self.head: Any = None
        self.buffers: Sequence[Any] = ()
        self.values: list[Record] = []
        self.raised: Record | None = None
        self.over = False
        self.prompt: Record | None = None
        """The last question of a rank, if no record has followed it."""

    @property
    def what(self) -> str:
        """The name of the function."""
        return str(self.head["what"]) if self.head is not None else "the function"

    @property
    def relay(self) -> Relay | None:
        """The relay that shows the output, if it is shown."""
        return None if self._cell is None else self._relays.relay

    def replay(self) -> None:
        """Show the records that have arrived."""
        with deferred_interrupts():  # a record that was read and not shown would be lost
            for record in _joined(self._reader.read()):
                self._take(record)
                if self.over:
                    return

    def answer(self, answer: Answer) -> None:
        """Use the values of a call that has written nothing, before they are in the journal."""
        self.values = [Record("value", {"rank": rank}, (pickled,)) for rank, pickled in answer.values]
        self.over = True

    def _take(self, record: Record) -> None:
        head, kind = record.head, record.kind
        if kind == "begin" and self.head is None and self._is_own(head):
            self.head, self.buffers = head, record.buffers
            self._relays.enter(head)
            self._begin()
        elif kind == "ranks" and self._relays.enter(head) and self.head is not None:
            self._begin()
        elif self.head is not None and head.get("call", self.head["call"]) == self.head["call"]:
            self._take_own(kind, head, record)

    def _begin(self) -> None:
        if self._cell is None or self.relay is None:
            return
        made = self.head
        lines: Any = made["lines"] if self._lines == "as made" else self._lines
        self.relay.begin(self._cell, self._output or made["output"], made["first"], lines)

    def _take_own(self, kind: str, head: Any, record: Record) -> None:
        if kind == "value":
            self.values.append(record)
        elif kind == "raised":
            self.raised = record
        elif kind == "end":
            self.over = True
        elif self._cell is not None:
            self._show(self._cell, kind, head, record)

    def _show(self, cell: Cell, kind: str, head: Any, record: Record) -> None:
        relay = self.relay
        if kind == "output" and relay is not None:
            relay.take(head["rank"], head["which"], bytes(record.buffers[0]))
        elif kind == "failed" and relay is not None:
            relay.failed(head["rank"])
        elif kind == "text":
            cell.text(head["text"], head["stream"])
        elif kind == "cut":
            cell.notice(f"output is missing here: {head['why']}")
        self.prompt = record if kind == "prompt" else None

    def finish(self) -> None:
        """Show unfinished lines, because no more output follows."""
        if self.relay is not None and self.head is not None:  # otherwise the relay has shown nothing of this call
            self.relay.flush()
            self.relay.comms.end_call()
        if self._cell is not None:
            self._cell.close()


def follow(
    replayer: Replayer,
    wakeup: Wakeup | None,
    stop: Stop | None = None,
    *,
    token: str = "",
    deadline: float = math.inf,
    asks: Callable[[Record], None] = lambda question: None,
    on_interrupt: Callable[[], None] | None = None,
) -> None:
    """Show a call until its end, the end of its keeper, or the `deadline` (of `time.monotonic`).

    Args:
        replayer: The call.
        wakeup: The source of wakeups when the journal has grown. None: the keeper has ended.
        token: The token of the call, if this process has made it and so may get an answer.
        stop: The object by which another thread interrupts the call.
        asks: A function that has the user answer a question of a rank.
        on_interrupt: A function that passes on an interrupt, of the user or of the other thread. None: the interrupt is
            raised.
    """
    page: Page | None = None
    alive = wakeup is not None
    while True:
        try:
            if not replayer.over:
                replayer.replay()
            if replayer.over or not alive or time.monotonic() > deadline:
                break
            if replayer.prompt is not None:
                question, replayer.prompt = replayer.prompt, None
                asks(question)
            relay = replayer.relay
            if relay is not None:
                page = page or Page(relay.comms, foreground=stop is None)
                relay.show_unfinished()
                page.look()
            left = min(AT_A_TIME, max(0.0, deadline - time.monotonic()))
            assert wakeup is not None
            if _readable(wakeup, stop, left if page is None else page.soon(left)):
                with deferred_interrupts():  # an answer that was read and not used would be lost
                    answers = wakeup.read()
                    alive = answers is not None
                    for answer in answers or ():
                        if answer.token == token:
                            replayer.answer(answer)
        except KeyboardInterrupt:
            if on_interrupt is None:
                raise
            on_interrupt()
    if page is not None:
        page.close()


def _readable(wakeup: Wakeup, stop: Stop | None, seconds: float) -> bool:
    """Wait for a wakeup; return whether one has come. Raises `KeyboardInterrupt` after a stop."""
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    if stop is not None:
        poll.register(stop.fd, select.POLLIN)
    with interruptible():
        ready = [fd for fd, _ in poll.poll(1000 * seconds)]
    if stop is not None and stop.fd in ready:
        os.read(stop.fd, 1)
        raise KeyboardInterrupt
    return bool(ready)


def _joined(records: Iterable[Record]) -> Iterable[Record]:
    """Yield records. Several records in a row with output of one rank are joined into one."""
    last: Record | None = None
    parts: list[Any] = []
    for record in records:
        if last is not None and record.kind == "output" and record.head == last.head and len(parts) < 64:
            parts.append(record.buffers[0])
            continue
        if last is not None:
            yield Record("output", last.head, [b"".join(parts)])
        last, parts = None, []
        if record.kind == "output":
            last, parts = record, [record.buffers[0]]
        else:
            yield record
    if last is not None:
        yield Record("output", last.head, [b"".join(parts)])

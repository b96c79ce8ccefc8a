"""The executor of a keeper, which writes the output of its ranks to the journal instead of a cell."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ..kernel.calls.executor import Executor
from ..kernel.calls.group import Group
from ..kernel.calls.waiting import Waiting
from ..kernel.cell.cell import Cell
from ..kernel.cell.relay import Relay
from .writing import Journal


class JournalCell(Cell):
    """The cell of a call in the keeper: it writes notices and questions to the journal.

    Args:
        journal: The journal to write to.
        asks: Whether a client is there that can answer questions of ranks.
        will_wait: A function that is called before a wait for an answer.
    """

    def __init__(self, journal: Journal, asks: bool, will_wait: Callable[[], None]) -> None:
        super().__init__()
        self._journal, self.takes_input, self._will_wait = journal, asks, will_wait
        self.call = 0
        """The number of the call."""
        self._lines: queue.SimpleQueue[str | KeyboardInterrupt | None] = queue.SimpleQueue()
        self._asking = False  # whether a question has no answer yet
        self._lock = threading.RLock()

    def text(self, text: str, kind: int) -> None:
        self._journal.append("text", {"call": self.call, "text": text, "stream": kind})

    def ask(self, prompt: str, hidden: bool) -> str:
        with self._lock:  # the client may go, or stop the call, at the same moment
            asks = self._asking = self.takes_input
        if not asks:
            raise EOFError
        self._will_wait()
        self._journal.append("prompt", {"call": self.call, "prompt": prompt, "hidden": hidden})
        line = self._lines.get()
        if isinstance(line, KeyboardInterrupt):
            raise line
        if line is None:
            raise EOFError
        return line

    def answer(self, line: str | KeyboardInterrupt | None) -> bool:
        """Answer the question with a line, an interrupt, or None for the end of the input. Return False if no question
        waits for an answer.
        """
        with self._lock:
            asked, self._asking = self._asking, False
        if asked:
            self._lines.put(line)
        return asked

    def leave_alone(self) -> None:
        """Record that no client is there any more to answer."""
        with self._lock:
            self.takes_input = False
            self.answer(None)


class KeptExecutor(Executor):
    """An executor that writes the output of its ranks to a journal."""

    def __init__(self, journal: Journal, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._journal = journal
        self.number = 0
        """The numbers of the groups of ranks."""
        self.will_wait: Callable[[], None] = lambda: None
        """A function that is called before a wait that may take long."""

    def ready(self, cell: Cell, needed: int = 1) -> Group:
        before = self.group
        if before is None or not self._engine.local:  # ranks take a while to start, or to meet
            self.will_wait()
            self._journal.flush()
        group = super().ready(cell, needed)
        if group is not before:
            self.number += 1
            self._record(group)
            self._journal.append("ranks", self.ranks(), wake=False)
        return group

    def _wait_for(self, group: Group, waiting: Waiting, raised: BaseException | None) -> list[Any]:
        waiting.when_long = self._on_long
        return super()._wait_for(group, waiting, raised)

    def _on_long(self) -> None:
        """Have another thread listen to the client, and wake the client to read the beginning of the call. Short calls
        do without, because waking both takes time that the ranks need."""
        self.will_wait()
        self._journal.flush(wake=True)

    def _output_of(self, relay: Relay, rank: int) -> tuple[int, bool, int | None]:
        return relay.number, True, None  # all of it, for the journal

    def ranks(self) -> dict[str, Any]:
        """Return the description of the running ranks for the journal."""
        return {"group": self.number, "ranks": 0 if self.group is None else len(self.group.layout.devices)}

    def _record(self, group: Group) -> None:
        """Write the output of the ranks to the journal, before the relay interprets it."""
        relay, journal = group.relay, self._journal
        take: Callable[[int, int, bytes], None] = relay.take
        failed: Callable[[int], None] = relay.failed

        def take_and_record(rank: int, which: int, data: bytes) -> None:
            journal.append("output", {"rank": rank, "which": which}, data)
            take(rank, which, data)

        def fail_and_record(rank: int) -> None:
            journal.append("failed", {"rank": rank}, wake=False)
            failed(rank)

        vars(relay).update(take=take_and_record, failed=fail_and_record)

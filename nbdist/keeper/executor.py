"""The executor of a keeper: what its ranks write goes to the journal, and to no cell."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from ..kernel.calls.executor import Executor
from ..kernel.calls.group import Group
from ..kernel.cell.cell import Cell
from .writing import Journal


class JournalCell(Cell):
    """The cell of a call as the keeper has it: notices and questions go to the journal.

    Args:
        journal: Where they go.
        asks: Whether somebody is there who can answer questions of ranks.
    """

    def __init__(self, journal: Journal, asks: bool) -> None:
        super().__init__()
        self._journal, self.takes_input = journal, asks
        self.call = 0
        """The number of the call."""
        self.answers: queue.SimpleQueue[str | KeyboardInterrupt | None] = queue.SimpleQueue()
        """Lines that are typed; None: the end of the input."""
        self.asking = False

    def text(self, text: str, kind: int) -> None:
        self._journal.append("text", {"call": self.call, "text": text, "stream": kind})

    def ask(self, prompt: str, hidden: bool) -> str:
        if not self.takes_input:
            raise EOFError
        self.asking = True
        try:
            self._journal.append("prompt", {"call": self.call, "prompt": prompt, "hidden": hidden})
            line = self.answers.get()
        finally:
            self.asking = False
        if isinstance(line, KeyboardInterrupt):
            raise line
        if line is None:
            raise EOFError
        return line


class KeptExecutor(Executor):
    """An executor whose ranks' output goes to a journal."""

    def __init__(self, journal: Journal, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._journal = journal
        self.number = 0
        """Counts the groups of ranks."""

    def ready(self, cell: Cell, needed: int = 1) -> Group:
        before = self.group
        group = super().ready(cell, needed)
        if group is not before:
            self.number += 1
            self._record(group)
            self._journal.append("ranks", self.ranks(), ring=False)
        return group

    def ranks(self) -> dict[str, Any]:
        """Return what the journal has of the running ranks."""
        return {"group": self.number, "ranks": 0 if self.group is None else len(self.group.layout.devices)}

    def _record(self, group: Group) -> None:
        """Put what the ranks write into the journal before the relay makes sense of it."""
        relay, journal = group.relay, self._journal
        take: Callable[[int, int, bytes], None] = relay.take
        failed: Callable[[int], None] = relay.failed

        def take_and_record(rank: int, which: int, data: bytes) -> None:
            journal.append("output", {"rank": rank, "which": which}, data)
            take(rank, which, data)

        def fail_and_record(rank: int) -> None:
            journal.append("failed", {"rank": rank}, ring=False)
            failed(rank)

        vars(relay).update(take=take_and_record, failed=fail_and_record)

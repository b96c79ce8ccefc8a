"""Input for ranks: lines of `input()`, passwords, and commands of debuggers."""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Iterator

from ...wire.frames import STDOUT
from ...wire.protocol import Line, Prompt
from . import stacks
from .group import Group

#: Seconds in which the rank that was answered last may ask again, before another rank gets its turn.
_STAYS = 0.3
_OTHER_RANK = re.compile(r"\s*rank\s+(\d+)\s*")


class Keyboard:
    """Queue of the ranks' questions to the user, one at a time. In a debugger the user can switch to another rank.

    Args:
        group: The ranks that may ask.
        commands: Lines to answer instead of the user, then "quit". None: the user types.
        refusal: The reason why the user cannot be asked; empty if the user can be.
    """

    def __init__(self, group: Group, commands: Iterable[str] | None = None, refusal: str = "") -> None:
        self._group, self._refusal = group, refusal
        self._commands: Iterator[str] | None = None if commands is None else iter(commands)
        self._questions: dict[int, Prompt] = {}
        self._rank: int | None = None  # the rank that was answered last
        self._answered = 0.0  # the time of that answer
        self._closed = False

    def ask(self, rank: int, question: Prompt) -> None:
        """Store a rank's question, or refuse it at once if the user cannot be asked."""
        self._questions[rank] = question
        if self._closed or self._refusal:
            self._answer(rank, None)

    def close(self) -> None:
        """Refuse all open and later questions: the call is about to end."""
        self._closed = True
        for rank in list(self._questions):
            self._answer(rank, None)

    def soon(self, seconds: float) -> float:
        """Return the longest time to wait for messages: `seconds`, or less while a rank waits for input."""
        return min(0.1, seconds) if self._questions else seconds

    def ready(self) -> bool:
        """Return whether the user can be asked a question now."""
        stays = self._rank is not None and time.monotonic() < self._answered + _STAYS
        return bool(self._questions) and (self._rank in self._questions or not stays)

    def put(self, pending: Container[int]) -> None:
        """Show the next question to the user, and send the answer to its rank. `pending`: the ranks that have not
        answered.
        """
        rank = self._rank if self._rank in self._questions else min(self._questions)
        assert rank is not None
        question = self._questions[rank]
        self._group.relay.flush()
        if question.shown:
            self._group.relay.cell.text(question.shown, STDOUT)
        if question.debugger and rank != self._rank and self._commands is None:
            self._show_other_ranks(rank, pending)
        self._rank = rank
        self._questions[rank] = question._replace(shown="")  # the cell shows it once
        try:
            line = self._typed(f"(rank {rank}) {question.prompt}", question.hidden)
        except EOFError:
            self._answer(rank, None)
            return
        except Exception as exc:  # for example a front end without an input box, or a captured standard input
            self._refusal = f"no input is possible here ({type(exc).__name__}: {exc})"
            self._answer(rank, None)
            return
        other = _OTHER_RANK.fullmatch(line) if question.debugger else None
        if other is None:
            self._answer(rank, line)
        elif int(other[1]) in self._questions:
            self._rank = int(other[1])
            self._group.relay.cell.notice(f"rank {self._rank}")
        else:
            self._group.relay.cell.notice(f"rank {int(other[1])} is not at a breakpoint")

    def _typed(self, prompt: str, hidden: bool) -> str:
        if self._commands is None:
            return self._group.relay.cell.ask(prompt, hidden)
        line = next(self._commands, "quit")
        self._group.relay.cell.text(f"{prompt}{line}\n", STDOUT)
        return line

    def _answer(self, rank: int, line: str | None) -> None:
        del self._questions[rank]
        self._answered = time.monotonic()
        self._group.send(rank, Line(line, self._refusal))

    def _show_other_ranks(self, rank: int, pending: Container[int]) -> None:
        """Show in the cell where the other ranks are: most of them wait for this one."""
        others = [other for other in range(len(self._group.ranks.pids)) if other in pending and other != rank]
        at = [other for other in others if other in self._questions]
        taken = stacks.take(self._group.ranks, [other for other in others if other not in at])
        where = [f"rank {other} is at a breakpoint, too (type: rank {other})" for other in at]
        where += [f"rank {other} {stacks.describe(taken[other])}" for other in others if other not in at]
        if where:
            self._group.relay.cell.notice(f"rank {rank} is paused; meanwhile {'; '.join(where[:8])}")

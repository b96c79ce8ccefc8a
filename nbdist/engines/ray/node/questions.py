"""Questions about the ranks of a node, and requests that the agent carries out for the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....system.connections import Address
from ....wire.log import Log
from ...local import LocalRanks


class Questions:
    """Answers about the ranks of a node. The ranks are given by their numbers in the whole session.

    Args:
        ranks: The ranks of the node.
        first: The number of its first rank.
        logs: The output of each rank.
    """

    def __init__(self, ranks: LocalRanks, first: int, logs: Sequence[Log]) -> None:
        self._ranks, self._first, self._logs = ranks, first, logs

    def signal(self, signals: Iterable[tuple[int, int]]) -> None:
        for rank, signum in signals:
            self._ranks.signal(rank - self._first, signum)

    def abort(self, aborts: Iterable[tuple[int, tuple[int, Sequence[Address]]]]) -> None:
        for rank, (group, peers) in aborts:
            self._ranks.abort(rank - self._first, group, peers)

    def deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> None:
        self._ranks.deliver_widget_event(rank - self._first, content, buffers)

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the stacks of those ranks in `ranks` that run on this node."""
        found = self._ranks.stacks(self._own(ranks))
        return {self._first + number: text for number, text in found.items()}

    def memory(self, ranks: Iterable[int]) -> dict[int, int | None]:
        """Return the memory in bytes of those ranks in `ranks` that run on this node."""
        found = self._ranks.memory(self._own(ranks))
        return {self._first + number: size for number, size in found.items()}

    def log(self, ranks: Iterable[int], most: int) -> dict[int, str]:
        """Return the last text of those ranks in `ranks` that run on this node."""
        return {self._first + number: self._logs[number].text(most) for number in self._own(ranks)}

    def _own(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks in `ranks` that run on this node, by their numbers on it."""
        here = range(len(self._ranks.pids))
        return [rank - self._first for rank in ranks if rank - self._first in here]

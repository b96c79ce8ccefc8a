"""Values in the memory of a keeper, because the disk had no room for them."""

from __future__ import annotations

import threading

from ..errors import NbdistError
from ..kernel.calls.outcomes import UnreadOutcome


class HeldValues:
    """The values for which the disk had no room, by call and rank.

    Args:
        keep: The largest size of the values of earlier calls together, in bytes. The values of the last call are not
            counted.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._values: dict[tuple[int, int], UnreadOutcome] = {}  # in the order of the calls
        self._lock = threading.Lock()

    def put(self, call: int, rank: int, value: UnreadOutcome) -> None:
        """Hold a value."""
        with self._lock:
            self._values[call, rank] = value

    def get(self, call: int, rank: int) -> UnreadOutcome:
        """Return a value. Raises `NbdistError` if it was dropped."""
        with self._lock:
            if (call, rank) not in self._values:
                raise NbdistError("the value was removed to make room for the values of later calls (keep=)")
            return self._values[call, rank]

    def drop(self) -> None:
        """Drop values of the oldest calls until the rest is within the bound. A new call begins with this."""
        with self._lock:
            total = sum(map(_size, self._values.values()))
            while total > self._keep:
                total -= _size(self._values.pop(next(iter(self._values))))


def _size(value: UnreadOutcome) -> int:
    return sum(one.nbytes for one in ([] if value.pickled is None else [value.pickled, *value.views]))

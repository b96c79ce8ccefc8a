"""A clock for the timeouts of calls: no test may depend on what a machine gets done within a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from nbdist import Session
from nbdist.kernel.calls import ending


def one_answered(session: Session) -> bool:
    """Return whether of two ranks rank 1 has answered, and rank 0 has not."""
    states = [row.split()[3] for row in str(session.status()).splitlines()[2:]]  # all are idle before the call is sent
    return states == ["running", "idle"]


class CallClock:
    """While it is entered, the clock by which calls are waited for stands still until `due()` holds; then any timeout
    is over.

    Args:
        due: Is asked each time that somebody looks at the clock.
    """

    def __init__(self, due: Callable[[], object]) -> None:
        self._due, self._stands_at, self._over = due, time.monotonic(), False

    def monotonic(self) -> float:
        if self._over:
            return time.monotonic() + 1e6  # graces that begin now take their time
        self._over = bool(self._due())  # from the next look on
        return self._stands_at

    def __enter__(self) -> None:
        ending.time = self  # type: ignore[assignment]

    def __exit__(self, *exc: object) -> None:
        ending.time = time

"""Detection of ranks that cannot go on. Busy ranks are observed from outside; only idle ranks are asked for stacks."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ...system import waits
from .flights import needs_flights
from .group import Group
from .standings import Standing
from .states import observe
from .verdicts import Verdict, verdict

#: Seconds between two looks; seconds without CPU time after which ranks are asked for their stacks.
LOOK_EVERY, QUIET = 2.0, 8.0
#: Seconds between two requests for stacks, at first and later. A verdict needs two equal answers.
ASK_EVERY, ASK_RARELY = 4.0, 10.0
#: The largest share of a core that an idle rank uses: gloo's threads poll 100 times a second.
_IDLE = 0.05
#: Seconds of CPU time in which a rank reads torch's flight recorder; seconds after which a verdict does without: ranks
#: of a busy machine need a while, and a GPU may never answer.
_TO_READ_FLIGHTS, _FLIGHTS_WITHIN = 1.0, 15.0
#: Seconds of CPU time that the workers of a loader may use between two requests.
_IDLE_WORKERS = 0.1


class _Evidence(NamedTuple):
    """The state of the ranks at one moment."""

    standings: Sequence[Standing]
    workers: Mapping[int, float]
    """Seconds of CPU time of child processes, by pid."""

    def is_as(self, earlier: _Evidence) -> bool:
        """Return whether no rank has changed its state since `earlier`."""
        mine, others = (
            [(o.rank, o.state, o.doing, o.stands_in, o.wakers, o.active) for o in e.standings] for e in (self, earlier)
        )
        used = sum(self.workers.values()) - sum(earlier.workers.values())
        return mine == others and self.workers.keys() == earlier.workers.keys() and used < _IDLE_WORKERS


class Hangs:
    """Detector of hangs in one call.

    Args:
        group: The ranks of the session.
        targets: The ranks that run the call.
    """

    def __init__(self, group: Group, targets: Collection[int]) -> None:
        self._group, self._targets = group, frozenset(targets)
        self._used: dict[int, float] = {}
        self._counts: list[int] = []
        self._looked = self._still = time.monotonic()
        self._ask_at = self._allowed = 0.0
        self._flights_until: float | None = None
        self._asked = 0
        self._earlier: _Evidence | None = None
        self._over = group.recording is None or not os.path.exists("/proc/self/task")

    def look(self, pending: Collection[int]) -> Verdict | None:
        """Look at the ranks that have not answered. If the reason is found why they will never answer, return it, once.

        A look reads one file for each rank every two seconds. Ranks are asked for stacks only when none of them has
        used CPU time for a while.
        """
        now = time.monotonic()
        if self._over or now < self._looked + LOOK_EVERY:
            return None
        if not self._idle(pending, now - self._looked):
            self._still, self._earlier, self._asked, self._flights_until = now, None, 0, None
        self._looked = now
        if now < self._still + QUIET or now < self._ask_at:
            return None
        evidence = _Evidence(*observe(self._group, self._targets, pending, now, self._still))
        known = not self._reads_flights(evidence.standings, now)
        self._asked += 1
        self._ask_at = time.monotonic() + (ASK_EVERY if self._asked < 4 else ASK_RARELY)
        earlier, self._earlier = self._earlier, evidence
        found = verdict(evidence.standings) if known and earlier is not None and evidence.is_as(earlier) else None
        self._over = found is not None
        return found

    def _reads_flights(self, standings: Sequence[Standing], now: float) -> bool:
        """Return whether a verdict needs collectives that ranks still read from their flight recorders. They begin when
        this is asked first, and a later answer has the collectives."""
        if not needs_flights(standings):
            return False
        if begins := self._flights_until is None:
            self._group.ranks.read_flight_recorders(range(len(standings)))
            self._flights_until = now + _FLIGHTS_WITHIN
        reads = begins or (now < self._flights_until and any(one.flight is None for one in standings))
        if reads:
            self._allowed = _TO_READ_FLIGHTS
        return reads

    def _idle(self, pending: Collection[int], seconds: float) -> bool:
        """Return whether no rank has used CPU time or begun a collective since the last look."""
        recording = self._group.recording
        assert recording is not None
        pids = self._group.ranks.pids
        counts = [recording.count(rank) for rank in range(len(pids))]
        idle = counts == self._counts and self._used.keys() == set(pending)
        self._counts, before, self._used = counts, self._used, {}
        for rank in pending:
            pid = pids[rank]
            use = None if pid is None else waits.use(pid)
            if use is None:
                idle = False
                continue
            self._used[rank] = use.seconds
            # A main thread that wakes for a moment may be found running, so that its state says less than its CPU time.
            most = 0.02 + _IDLE * seconds + self._allowed
            idle = idle and use.state != "D" and use.seconds - before[rank] <= most
        self._allowed = 0.0
        return idle

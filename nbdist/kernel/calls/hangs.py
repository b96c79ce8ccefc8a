"""Detection of ranks that cannot go on. Busy ranks are observed from outside; only idle ranks are asked for stacks."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...notebook.shell import cell_numbers
from ...system import waits
from ...wire.recording import Collective
from ...wire.stacks import FILELOCK
from . import stacks
from .group import Group
from .stacks import Frame
from .verdicts import Standing, Verdict, verdict

#: Seconds between two looks; seconds without CPU time after which ranks are asked for their stacks.
LOOK_EVERY, QUIET = 2.0, 8.0
#: Seconds between two requests for stacks, at first and later. A verdict needs two equal answers.
ASK_EVERY, ASK_RARELY = 4.0, 10.0
#: The largest share of a core that an idle rank uses: gloo's threads poll 100 times a second.
_IDLE = 0.05
#: Seconds of CPU time that the workers of a loader may use between two requests.
_IDLE_WORKERS = 0.1

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
#: Files with code that waits for other ranks and is not recorded: C++ calls it, it makes a group, or nbdist uses it.
_COLLECTIVE = tuple(
    os.path.join(*path.split("/"))
    for path in (
        "torch/distributed/distributed_c10d.py",
        "torch/distributed/_functional_collectives.py",
        "torch/distributed/utils.py",
        "torch/nn/parallel/distributed.py",
        "nbdist/shm/collectives.py",
    )
)
#: The file of torch through which Python calls operators in C++.
_OPERATORS = os.path.join("torch", "_ops.py")
#: The file with the event loop of asyncio.
_EVENT_LOOP = os.path.join("asyncio", "base_events.py")
#: The function of torch that runs a backward pass, which includes DDP's all_reduce.
_BACKWARD = "_engine_run_backward"


class _Evidence(NamedTuple):
    """The state of the ranks at one moment."""

    at: float
    standings: Sequence[Standing]
    workers: Mapping[int, float]
    """Seconds of CPU time of child processes, by pid."""

    def is_as(self, earlier: _Evidence) -> bool:
        """Return whether no rank has changed its state since `earlier`."""
        mine, others = ([(o.rank, o.state, o.doing, o.stands_in) for o in e.standings] for e in (self, earlier))
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
        self._ask_at = 0.0
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
            self._still, self._earlier, self._asked = now, None, 0
        self._looked = now
        if now < self._still + QUIET or now < self._ask_at:
            return None
        evidence = self._ask(pending, now)
        self._asked += 1
        self._ask_at = time.monotonic() + (ASK_EVERY if self._asked < 4 else ASK_RARELY)
        earlier, self._earlier = self._earlier, evidence
        found = verdict(evidence.standings) if earlier is not None and evidence.is_as(earlier) else None
        self._over = found is not None
        return found

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
            idle = idle and use.state != "D" and use.seconds - before[rank] <= 0.02 + _IDLE * seconds
        return idle

    def _ask(self, pending: Collection[int], now: float) -> _Evidence:
        ranks, recording = self._group.ranks, self._group.recording
        assert recording is not None
        pids = [-1 if pid is None else pid for pid in ranks.pids]
        stopped = {rank for rank in pending if (use := waits.use(pids[rank])) is not None and use.state == "T"}
        taken = stacks.take(ranks, set(pending) - stopped)
        holders = waits.lock_holders()
        numbers = cell_numbers()
        standings, workers = [], {}
        for rank, pid in enumerate(pids):
            begun = recording.read(rank)
            places = {one.number: _place(one, numbers) for one in begun}
            own = Standing(rank, "returned", begun=begun, places=places)
            if rank not in pending:
                standings.append(own if rank in self._targets else replace(own, state="absent"))
            elif rank in stopped:
                standings.append(replace(own, state="stopped", doing="is stopped", seconds=now - self._still))
            else:
                kids = waits.children(pid)
                uses = {kid: waits.use(kid) for kid in kids}
                workers.update({kid: use.seconds for kid, use in uses.items() if use is not None})
                state, doing = _state(pid, taken[rank] or [], own, kids)
                holder = holders.get(pid, _filelock_holder(taken[rank] or []))
                if state == "runs" and holder in pids:
                    state, doing = "file lock", f"waits for the lock of a file{_at(taken[rank] or [])}"
                since = min((now - one.begin for one in own.stands_in), default=now - self._still)
                at = pids.index(holder) if holder in pids else None
                standings.append(replace(own, state=state, doing=doing, seconds=since, holder=at))
        return _Evidence(now, standings, workers)


def _state(pid: int, frames: Sequence[Frame], own: Standing, kids: Sequence[int]) -> tuple[str, str]:
    """Return the state of a rank, as a word of `Standing`, and its description. If nothing is known, the word is
    "runs"."""
    if not frames or not waits.at_rest(pid):
        return "runs", ""
    main = [one for one in own.stands_in if one.main_thread]
    if main:
        return "collective", f"waits in {own.calls(main[-1])}"
    *inner, bottom = frames
    if bottom.name in ("serve", "join", "_join", "leave"):
        return "runs", ""
    user = stacks.of_user(inner)
    inner = inner if user is None else inner[: inner.index(user)]  # the functions that the user's line has called
    if any(frame.file.endswith(_LOADER) for frame in inner):
        stuck = [kid for kid in kids if waits.stands_still(kid)]
        rest = [waits.call(kid, kid) for kid in kids if kid not in stuck]
        if stuck and all(one is not None and one.name in ("poll", "futex", "futex_forever") for one in rest):
            return "loader", f"waits for its data loader{_at(frames)}, whose worker (pid {stuck[0]}) waits for a lock"
        return "runs", ""
    innermost = next((frame for frame in inner if not frame.file.endswith(_OPERATORS)), None)
    if innermost is not None and (innermost.file.endswith(_COLLECTIVE) or innermost.name == _BACKWARD):
        return "collective", stacks.describe(list(frames))
    now = waits.call(pid, pid)
    if now is not None and now.name == "futex_forever" and own.stands_in:
        return "lock", f"waits for a lock or a thread{_at(frames)}"
    if own.stands_in and any(one.file.endswith(_EVENT_LOOP) for one in inner) and waits.for_one_descriptor(pid):
        return "lock", f"awaits a thread{_at(frames)}"
    writer = waits.full_pipe(pid, waits.descendants(pid))
    if writer is not None:
        who = "it writes" if writer == pid else f"its child (pid {writer}) writes"
        return "pipe", f"waits{_at(frames)}: {who} into a full pipe"
    return "runs", ""


def _filelock_holder(frames: Sequence[Frame]) -> int:
    """Return the process that holds the lock of the package `filelock` for which a rank waits; -1 if there is none."""
    paths = [one.name.partition(" of ")[2] for one in frames if one.file.endswith(FILELOCK)]
    return next((waits.lock_holder(path) for path in paths if path), -1)


def _at(frames: Sequence[Frame]) -> str:
    user = stacks.of_user(frames)
    return "" if user is None else f" at {user.place(cell_numbers())}"


def _place(one: Collective, numbers: Mapping[str, int]) -> str:
    return Frame(one.file, str(one.line), "").place(numbers) if one.file else ""

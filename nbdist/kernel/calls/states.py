"""The states of ranks that use no CPU time, from their stacks, their collectives and what the system knows of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...notebook.shell import cell_numbers
from ...system import pipes, waits
from ...system.interrupts import NUDGE
from ...wire.forking import STACK_SIGNAL
from ...wire.recording import Collective
from ...wire.stacks import FILELOCK, STORE
from . import flights, stacks
from .group import Group
from .stacks import Frame
from .standings import Standing

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
#: The files with the code of threads that wake no other thread: two of nbdist, and tqdm's monitor.
_SILENT = (
    os.path.join("nbdist", "wire", "stacks.py"),
    os.path.join("nbdist", "rank", "flight.py"),
    os.path.join("tqdm", "_monitor.py"),
)
#: Signals whose handlers are nbdist's.
_OWN_SIGNALS = (NUDGE, STACK_SIGNAL)
#: Seconds after a call of `is_completed` for which a rank counts as waiting in the collective.
_POLLED = 5.0


class Seen(NamedTuple):
    """A rank that has not answered, as the kernel sees it."""

    pid: int
    frames: Sequence[Frame]
    """The stack of the main thread, innermost frame first; empty if the rank does not answer."""
    children: Sequence[int] = ()
    silent: Collection[int] | None = None
    """The threads that wake no other thread. None: they are not known, or the user may wake a thread by a widget."""


def observe(
    group: Group, targets: Collection[int], pending: Collection[int], now: float, still: float
) -> tuple[list[Standing], dict[int, float]]:
    """Return the known state of each rank, and the CPU time of all their child processes, in seconds, by pid.

    Args:
        group: The ranks.
        targets: The ranks that take part in the call.
        pending: The ranks that have not answered.
        now: The time, in seconds of `time.monotonic`.
        still: The time since which the ranks are idle.
    """
    recording = group.recording
    assert recording is not None
    pids = [-1 if pid is None else pid for pid in group.ranks.pids]
    stopped = {rank for rank in pending if (use := waits.use(pids[rank])) is not None and use.state == "T"}
    answers = group.ranks.stacks([rank for rank, pid in enumerate(pids) if pid >= 0 and rank not in stopped])
    takes_input = group.relay.comms.take_input()
    holders, numbers = waits.lock_holders(), cell_numbers()
    found: list[Standing] = []
    workers: dict[int, float] = {}
    for rank, pid in enumerate(pids):
        begun = [_entered(one, now) for one in recording.read(rank)]
        places = {one.number: _place(one, numbers) for one in begun}
        flight = flights.parse(answers.get(rank, ""), len(pids))
        threads = stacks.other_threads(answers.get(rank, ""))
        active = threads is None or not all(_is_silent(frames) for _, frames in threads)
        own = Standing(rank, "returned" if rank in targets else "absent", begun=begun, places=places)
        own = replace(own, flight=flight, active=active)
        if rank not in pending:
            found.append(own)
        elif rank in stopped:
            found.append(replace(own, state="stopped", doing="is stopped", seconds=now - still))
        else:
            silent = None if threads is None or takes_input else {one for one, frames in threads if _is_silent(frames)}
            seen = Seen(pid, stacks.main_thread(answers.get(rank, "")), waits.children(pid), silent)
            workers.update({kid: use.seconds for kid in seen.children if (use := waits.use(kid)) is not None})
            since = min((now - one.begin for one in own.stands_in), default=now - still)
            found.append(replace(_with_holder(state(own, seen, pids), seen, holders, pids), seconds=since))
    return found, workers


def _entered(one: Collective, now: float) -> Collective:
    """Return a collective as one in which a thread waits, if a thread asks again and again whether it has ended."""
    if one.polled is None:
        return one
    return one._replace(waits=one.waits or now - one.polled < _POLLED, polled=None)


def _with_holder(own: Standing, seen: Seen, holders: Mapping[int, int], pids: Sequence[int]) -> Standing:
    """Return the state of a rank with the rank that holds the file lock for which it waits."""
    holder = holders.get(seen.pid, _filelock_holder(seen.frames))
    if own.state != "runs" or holder not in pids:
        return own
    doing = f"waits for the lock of a file{_at(seen.frames)}"
    return replace(own, state="file lock", doing=doing, holder=pids.index(holder))


def state(own: Standing, seen: Seen, pids: Sequence[int]) -> Standing:
    """Return `own` with the state of the rank, its description, and the ranks that could end its wait. If nothing is
    known, the state is "runs".

    Args:
        own: The rank, with its collectives.
        seen: What is seen of it.
        pids: The pids of all ranks.
    """
    frames, pid = seen.frames, seen.pid
    runs = replace(own, state="runs")
    if not frames or not waits.at_rest(pid):
        return runs
    main = [one for one in own.stands_in if one.main_thread]
    if main:
        return replace(own, state="collective", doing=f"waits in {own.calls(main[-1])}")
    *inner, bottom = frames
    if bottom.name in ("serve", "join", "_join", "leave"):
        return runs
    user = stacks.of_user(inner)
    inner = inner if user is None else inner[: inner.index(user)]  # the functions that the user's line has called
    if any(frame.file.endswith(_LOADER) for frame in inner):
        return _at_loader(own, seen)
    innermost = next((frame for frame in inner if not frame.file.endswith((_OPERATORS, STORE))), None)
    if innermost is not None and (innermost.file.endswith(_COLLECTIVE) or innermost.name == _BACKWARD):
        return replace(own, state="collective", doing=stacks.describe(list(frames)))
    now = waits.call(pid, pid)
    if now is not None and now.name == "futex_forever" and own.stands_in:
        return replace(own, state="lock", doing=f"waits for a lock or a thread{_at(frames)}")
    if own.stands_in and any(one.file.endswith(_EVENT_LOOP) for one in inner) and waits.for_one_descriptor(pid):
        return replace(own, state="lock", doing=f"awaits a thread{_at(frames)}")
    writer = pipes.full_pipe(pid, waits.descendants(pid))
    if writer is not None:
        who = "it writes" if writer == pid else f"its child (pid {writer}) writes"
        return replace(own, state="pipe", doing=f"waits{_at(frames)}: {who} into a full pipe")
    return runs if own.stands_in else _for_what_comes(own, seen, inner, pids)


def _at_loader(own: Standing, seen: Seen) -> Standing:
    """Return the state of a rank that waits for a worker of its data loader."""
    stuck = [kid for kid in seen.children if waits.stands_still(kid)]
    rest = [waits.call(kid, kid) for kid in seen.children if kid not in stuck]
    if stuck and all(one is not None and one.name in ("poll", "futex", "futex_forever") for one in rest):
        doing = f"waits for its data loader{_at(seen.frames)}, whose worker (pid {stuck[0]}) waits for a lock"
        return replace(own, state="loader", doing=doing)
    return replace(own, state="runs")


def _for_what_comes(own: Standing, seen: Seen, inner: Sequence[Frame], pids: Sequence[int]) -> Standing:
    """Return the state of a rank that waits for what only its own threads, or other ranks, can cause."""
    at, others = _at(seen.frames), frozenset(range(len(pids))) - {own.rank}
    keys = next((one.name.partition(" of ")[2] for one in inner if one.file.endswith(STORE)), "")
    if keys:
        doing = f"waits for {keys} in the store{at}"
        return replace(own, state="nothing comes", doing=doing, awaits="key", wakers=others)
    now = waits.call(seen.pid, seen.pid)
    wakers = None if seen.silent is None or not at else pipes.wakers(seen.pid, seen.silent, _OWN_SIGNALS)
    if now is None or wakers is None or not wakers <= set(pids):
        return replace(own, state="runs")
    awaits = "pipe" if now.name == "read" else "lock"
    called = stacks.describe(list(seen.frames)) if inner else f"waits{at}"
    doing = f"{called}: it reads an empty pipe" if awaits == "pipe" else called
    ranks = frozenset(pids.index(one) for one in wakers)
    # Its other threads wait, too: `wakers` has looked at them.
    return replace(own, state="nothing comes", doing=doing, awaits=awaits, wakers=ranks, active=False)


def _is_silent(frames: Sequence[Frame]) -> bool:
    return any(frame.file.endswith(_SILENT) for frame in frames)


def _filelock_holder(frames: Sequence[Frame]) -> int:
    """Return the process that holds the lock of the package `filelock` for which a rank waits; -1 if there is none."""
    paths = [one.name.partition(" of ")[2] for one in frames if one.file.endswith(FILELOCK)]
    return next((waits.lock_holder(path) for path in paths if path), -1)


def _at(frames: Sequence[Frame]) -> str:
    user = stacks.of_user(frames)
    return "" if user is None else f" at {user.place(cell_numbers())}"


def _place(one: Collective, numbers: Mapping[str, int]) -> str:
    return Frame(one.file, str(one.line), "").place(numbers) if one.file else ""

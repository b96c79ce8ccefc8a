"""The reasons why ranks of a call cannot go on, derived from the known state of each rank. No rank is asked here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .flights import with_flights
from .mismatches import Found, difference, missing, missing_ranks, of_two, unrecorded
from .standings import Standing
from .stopping import ranks_named


@dataclass(frozen=True)
class Verdict:
    """The reason why a call cannot end."""

    kind: str
    """The class of hang, in a word or two."""
    doing: str
    why: str
    advice: str

    def __str__(self) -> str:
        return f"this call hangs: {self.doing}.\n  It cannot end: {self.why}.\n  What helps: {self.advice}"


def verdict(standings: Sequence[Standing]) -> Verdict | None:
    """Return the reason why a call cannot end; None if it can, or if the reason is not known.

    Args:
        standings: All ranks of the process group, by number, after some seconds in which none of them worked.
    """
    pending = [one for one in standings if one.state not in ("returned", "absent")]
    stuck = _stuck(standings)
    may_go_on = {one.rank for one in pending if one.state == "nothing comes"} - stuck
    if not pending or may_go_on or any(one.state == "runs" for one in pending):
        return None
    for known in (with_flights(standings), standings):
        pending = [known[one.rank] for one in pending]
        for kind, explain in _EXPLAIN.items():
            found = explain(known, pending)
            if found is not None:
                return Verdict(kind, _all_doing(standings), *found)
    return None


def _all_doing(standings: Sequence[Standing]) -> str:
    alike: dict[str, list[Standing]] = {}
    for one in standings:
        alike.setdefault(one.elsewhere(), []).append(one)
    lines = []
    for what, those in alike.items():
        each = "each of " if len(those) > 1 else ""
        seconds = min(one.seconds for one in those)
        lines.append(f"{each}{ranks_named(one.rank for one in those)} {what}" + f" for {seconds:.0f} s" * (seconds > 0))
    return "; ".join(lines)


def _stopped(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    stopped = [one.rank for one in pending if one.state == "stopped"]
    if not stopped:
        return None
    who = ranks_named(stopped)
    return (
        f"{who} {'was' if len(stopped) == 1 else 'were'} stopped by a signal",
        "continue the process with `kill -CONT` and its pid",
    )


def _pipe(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    for one in pending:
        if one.state == "pipe":
            return (
                f"a pipe is full, and only rank {one.rank} could read it, which waits",
                "read while the other side writes: subprocess.run(..., capture_output=True) or communicate()",
            )
    return None


def _loader(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    for one in pending:
        if one.state == "loader":
            return (
                f"a worker of rank {one.rank}'s data loader waits for a lock that a thread of the rank held when the "
                f"worker was forked, and no thread of the worker releases it",
                "make the lock in the worker, or use DataLoader(multiprocessing_context='spawn') or num_workers=0",
            )
    return None


def _file_lock(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    waiting = {one.rank for one in pending}
    for one in pending:
        if one.state == "file lock" and one.holder in waiting:
            holder = standings[one.holder]
            return (
                f"rank {one.rank} waits for the lock of a file that rank {holder.rank} holds, and rank {holder.rank} "
                f"{holder.doing}, for which it needs rank {one.rank}",
                "release the lock before the collective: end the `with` block above it",
            )
    return None


def _lock(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    for one in pending:
        threads = [c for c in one.stands_in if not c.main_thread]
        if one.state == "lock" and threads:
            return (
                f"rank {one.rank}'s main thread waits for another thread of it, which stands in "
                f"{one.calls(threads[-1])}, and the other ranks do not come there",
                "hold no lock across a collective, and make all collectives of a rank in one thread",
            )
    return None


#: By `Standing.awaits`: the reason if only the rank itself could end the wait, the reason if other ranks could, advice.
_AWAITED = {
    "lock": (
        "only a thread of rank {rank} could release the lock, set the event or fill the queue, and all of them wait",
        "only {wakers} could end the wait of rank {rank}'s threads, and {others}",
        "let a thread that goes on do that before the wait; a lock that the same thread takes twice has to be a "
        "threading.RLock",
    ),
    "pipe": (
        "only rank {rank} itself could write into the pipe, and all of its threads wait",
        "only {wakers} could write into the pipe that rank {rank} reads, and {others}",
        "write before the read, and close the writing end in each process that does not write: then the read ends",
    ),
    "key": (
        "",
        "no rank has set the key for which rank {rank} waits, and {others}",
        "set the key before the wait for it",
    ),
}


def _nothing_comes(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    for one in pending:
        if one.state == "nothing comes":
            alone, with_others, advice = _AWAITED[one.awaits]
            if not one.wakers and one.awaits != "key":
                return alone.format(rank=one.rank), advice
            others = "; ".join(f"rank {rank} {standings[rank].elsewhere()}" for rank in sorted(one.wakers))
            who = ranks_named(one.wakers) if one.wakers else ""
            return with_others.format(rank=one.rank, wakers=who, others=others or "there is no other rank"), advice
    return None


def _stuck(standings: Sequence[Standing]) -> set[int]:
    """Return the ranks whose waits only ranks could end that are stuck, too, or have left the call."""
    left = {one.rank for one in standings if one.state in ("returned", "absent")}
    stuck = {one.rank for one in standings if one.state not in ("returned", "absent", "runs")}
    while free := {rank for rank in stuck if not _is_held(standings[rank], standings, stuck | left)}:
        stuck -= free
    return stuck


def _is_held(one: Standing, standings: Sequence[Standing], still: set[int]) -> bool:
    """Return whether a rank waits for ranks of `still`."""
    if one.state == "nothing comes":
        return one.wakers <= still and not any(standings[rank].active for rank in {one.rank, *one.wakers})
    if one.state == "file lock":
        return one.holder in still
    return one.state not in ("collective", "lock") or bool(missing_ranks(one, standings) & still)


_EXPLAIN: dict[str, Callable[[Sequence[Standing], Sequence[Standing]], Found]] = {
    "stopped": _stopped,
    "full pipe": _pipe,
    "loader": _loader,
    "file lock": _file_lock,
    "lock": _lock,
    "nothing comes": _nothing_comes,
    "different collectives": difference,
    "send and recv": of_two,
    "missing rank": missing,
    "missing rank in C++": unrecorded,
}

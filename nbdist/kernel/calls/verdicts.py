"""The reasons why ranks of a call cannot go on, derived from the known state of each rank. No rank is asked here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...wire.recording import OF_TWO, Collective
from .stopping import ranks_named

#: Collectives that need a tensor of the same size and type from each rank.
_SAME_SIZE = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"}

SAME_STEPS = (
    "let all ranks make the same collectives in the same order: not under `if rank == 0`, and in a loop with as many "
    "batches on each rank (nbdist.recsys.loader's loaders and `equal_steps` see to that)"
)


@dataclass(frozen=True)
class Standing:
    """The known state of a rank."""

    rank: int
    state: str
    """
    - "returned", or "absent": takes no part in the call
    - "runs": runs, or may go on without another rank, for example after a sleep; also if nothing is known
    - "collective": waits for other ranks
    - "lock": waits for a lock of its own process, without a timeout
    - "file lock": waits for the lock of a file
    - "loader": waits for a worker of its data loader that will not answer
    - "pipe": the rank or its child writes into a full pipe that only the rank can read
    - "stopped": stopped by a signal
    """
    doing: str = ""
    """The state in words, such as "waits in all_reduce at Cell In[3], line 5"."""
    seconds: float = 0.0
    """The time in this state."""
    begun: Sequence[Collective] = ()
    """The last collectives that the rank has begun, if they are recorded."""
    places: Mapping[int, str] = field(default_factory=dict)
    """The lines that called these collectives, by the number of the collective."""
    holder: int | None = None
    """The rank that holds the file lock."""

    @property
    def stands_in(self) -> list[Collective]:
        """The collectives in which threads of the rank wait."""
        return [one for one in self.begun if one.waits]

    def calls(self, one: Collective) -> str:
        """Describe one of the rank's collectives, with its peer and the line that called it."""
        toward = {"s": " to", "i": " to", "r": " from"}[one.kind[0]] if one.kind in OF_TWO else " by"
        toward = " from" if one.kind == "irecv" else toward
        peer = "" if one.peer < 0 else f"{toward} rank {one.peer}"
        peer += f" with tag {one.tag}" if one.tag else ""
        place = self.places.get(one.number, "")
        return f"{one.what()}{peer}" + (f" at {place}" if place else "")


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
    if not pending or any(one.state == "runs" for one in pending):
        return None
    for kind, explain in _EXPLAIN.items():
        found = explain(standings, pending)
        if found is not None:
            return Verdict(kind, _all_doing(standings), *found)
    return None


def _all_doing(standings: Sequence[Standing]) -> str:
    alike: dict[str, list[Standing]] = {}
    for one in standings:
        alike.setdefault(_elsewhere(one), []).append(one)
    lines = []
    for what, those in alike.items():
        each = "each of " if len(those) > 1 else ""
        seconds = min(one.seconds for one in those)
        lines.append(f"{each}{ranks_named(one.rank for one in those)} {what}" + f" for {seconds:.0f} s" * (seconds > 0))
    return "; ".join(lines)


#: The result of an explanation: the reason why the call cannot end, and advice. None if it does not apply.
_Found = tuple[str, str] | None


def _stopped(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    stopped = [one.rank for one in pending if one.state == "stopped"]
    if not stopped:
        return None
    who = ranks_named(stopped)
    return (
        f"{who} {'was' if len(stopped) == 1 else 'were'} stopped by a signal",
        "continue the process with `kill -CONT` and its pid",
    )


def _pipe(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    for one in pending:
        if one.state == "pipe":
            return (
                f"a pipe is full, and only rank {one.rank} could read it, which waits",
                "read while the other side writes: subprocess.run(..., capture_output=True) or communicate()",
            )
    return None


def _loader(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    for one in pending:
        if one.state == "loader":
            return (
                f"a worker of rank {one.rank}'s data loader waits for a lock that a thread of the rank held when the "
                f"worker was forked, and no thread of the worker releases it",
                "make the lock in the worker, or use DataLoader(multiprocessing_context='spawn') or num_workers=0",
            )
    return None


def _file_lock(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
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


def _lock(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    for one in pending:
        threads = [c for c in one.stands_in if not c.main_thread]
        if one.state == "lock" and threads:
            return (
                f"rank {one.rank}'s main thread waits for another thread of it, which stands in "
                f"{one.calls(threads[-1])}, and the other ranks do not come there",
                "hold no lock across a collective, and make all collectives of a rank in one thread",
            )
    return None


def _difference(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    for ranks, group in _groups(pending).items():
        ways = first_difference([standings[rank] for rank in ranks], group)
        if not ways:
            continue
        number = next(iter(ways.values())).place_in_group
        calls: dict[str, list[int]] = {}
        for rank, one in ways.items():
            calls.setdefault(standings[rank].calls(one), []).append(rank)
        texts = "; ".join(f"{ranks_named(who)} in {what}" for what, who in calls.items())
        kinds = {one.kind for one in ways.values()}
        advice = SAME_STEPS if len(kinds) > 1 else "give the same sizes, types and roots on all ranks"
        return f"{_whose(ranks, standings)} {_th(number)} collective is not the same on all of them: {texts}", advice
    return None


def _groups(pending: Iterable[Standing]) -> dict[tuple[int, ...], str]:
    """Return the process groups in which ranks wait: names by members."""
    return {
        tuple(sorted(c.ranks)): c.group for one in pending for c in one.stands_in if c.kind not in OF_TWO and c.ranks
    }


def first_difference(standings: Sequence[Standing], group: str) -> dict[int, Collective]:
    """Return, by rank, the first collectives of a process group that have the same number and do not match."""
    by_rank = {
        one.rank: {c.place_in_group: c for c in one.begun if c.group == group and c.place_in_group} for one in standings
    }
    for number in sorted({number for own in by_rank.values() for number in own}):
        those = {rank: own[number] for rank, own in by_rank.items() if number in own}
        if len({_shape(one) for one in those.values()}) > 1:
            return those
    return {}


def _shape(one: Collective) -> tuple[object, ...]:
    """Return the properties of a collective that must be equal on all ranks."""
    return (one.kind, one.peer, *((one.elements, one.dtype) if one.kind in _SAME_SIZE else ()))


def _of_two(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    for one in pending:
        for c in one.stands_in:
            if c.kind not in OF_TWO:
                continue
            receives = "recv" in c.kind
            others = [standings[c.peer]] if 0 <= c.peer < len(standings) else [o for o in standings if o is not one]
            if any(_answers(other, one.rank, c) for other in others):
                continue
            texts = "; ".join(f"rank {other.rank} {_elsewhere(other)}" for other in others)
            verb = "receives" if receives else "sends"
            return f"rank {one.rank} {verb} in {one.calls(c)}, and {texts}", (
                "let each send have its recv on the other rank: where both send first, or both receive first, use "
                "isend and irecv, or batch_isend_irecv"
            )
    return None


def _answers(other: Standing, rank: int, one: Collective) -> bool:
    """Return whether a rank waits in the operation that matches `one` of another rank, such as `recv` for `send`."""
    receives = "recv" in one.kind
    return any(
        c.kind in OF_TWO and ("recv" in c.kind) != receives and c.peer in (rank, -1) and c.tag == one.tag
        for c in other.stands_in
    )


def _missing(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    for one in pending:
        for c in one.stands_in:
            if c.kind in OF_TWO:
                continue
            late = [
                standings[rank] for rank in c.ranks if rank < len(standings) and _count(standings[rank], c) is not None
            ]
            late = [other for other in late if (_count(other, c) or 0) < c.place_in_group and other is not one]
            if late:
                texts = "; ".join(
                    f"rank {o.rank} {_elsewhere(o)} after {_collectives(_count(o, c) or 0)} of this group" for o in late
                )
                return f"rank {one.rank} stands in its {_th(c.place_in_group)}, {one.calls(c)}, and {texts}", SAME_STEPS
    return None


def _count(standing: Standing, one: Collective) -> int | None:
    """Return the number of collectives that a rank has begun in the same process group; None if it is not known."""
    if standing.state == "collective" and not standing.stands_in:  # it waits in a collective that is not recorded
        return None
    return max((c.place_in_group for c in standing.begun if c.group == one.group), default=0)


def _unrecorded(standings: Sequence[Standing], pending: Sequence[Standing]) -> _Found:
    """Explain a collective that C++ calls, such as DDP's in the backward pass, or that makes a process group."""
    for one in pending:
        if one.state != "collective" or one.stands_in:
            continue
        others = [o for o in standings if o is not one and (o.stands_in or o.state != "collective")]
        others = others or [o for o in standings if o.doing.partition(" at ")[0] != one.doing.partition(" at ")[0]]
        if others:
            texts = "; ".join(f"rank {o.rank} {_elsewhere(o)}" for o in others)
            return f"rank {one.rank} {one.doing}, for which it needs all ranks, and {texts}", SAME_STEPS
    return None


def _elsewhere(one: Standing) -> str:
    return {"returned": "has returned", "absent": "takes no part in this call"}.get(one.state, one.doing)


def _whose(ranks: Sequence[int], standings: Sequence[Standing]) -> str:
    return "the ranks'" if len(ranks) == len(standings) else f"in the process group of {ranks_named(ranks)}, the"


def _collectives(number: int) -> str:
    return f"{number} collective{'' if number == 1 else 's'}"


def _th(number: int) -> str:
    """Return an ordinal number, such as "1st" or "12th"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


_EXPLAIN: dict[str, Callable[[Sequence[Standing], Sequence[Standing]], _Found]] = {
    "stopped": _stopped,
    "full pipe": _pipe,
    "loader": _loader,
    "file lock": _file_lock,
    "lock": _lock,
    "different collectives": _difference,
    "send and recv": _of_two,
    "missing rank": _missing,
    "missing rank in C++": _unrecorded,
}

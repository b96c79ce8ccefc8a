"""The reasons why ranks wait for one another in collectives, derived from the known state of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...wire.recording import OF_TWO, Collective
from .standings import Standing
from .stopping import ranks_named

#: Collectives that need a tensor of the same size and type from each rank.
_SAME_SIZE = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"}

SAME_STEPS = (
    "let all ranks make the same collectives in the same order: not under `if rank == 0`, and in a loop with as many "
    "batches on each rank (nbdist.recsys.loader's loaders and `equal_steps` see to that)"
)

#: The result of an explanation: the reason why the call cannot end, and advice. None if it does not apply.
Found = tuple[str, str] | None


def difference(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
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


def of_two(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    for one in pending:
        for c in one.stands_in:
            if c.kind not in OF_TWO:
                continue
            receives = "recv" in c.kind
            others = _peers(one, c, standings)
            if any(_answers(other, one.rank, c) for other in others):
                continue
            texts = "; ".join(f"rank {other.rank} {other.elsewhere()}" for other in others)
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


def missing(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
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
                    f"rank {o.rank} {o.elsewhere()} after {_collectives(_count(o, c) or 0)} of this group" for o in late
                )
                return f"rank {one.rank} stands in its {_th(c.place_in_group)}, {one.calls(c)}, and {texts}", SAME_STEPS
    return None


def _count(standing: Standing, one: Collective) -> int | None:
    """Return the number of collectives that a rank has begun in the same process group; None if it is not known."""
    if standing.state == "collective" and not standing.stands_in:  # it waits in a collective that is not recorded
        return None
    return max((c.place_in_group for c in standing.begun if c.group == one.group), default=0)


def unrecorded(standings: Sequence[Standing], pending: Sequence[Standing]) -> Found:
    """Explain a collective that C++ calls, such as DDP's in the backward pass, or that makes a process group."""
    for one in pending:
        if one.state != "collective" or one.stands_in:
            continue
        others = _not_in_the_same(one, standings)
        if others:
            texts = "; ".join(f"rank {o.rank} {o.elsewhere()}" for o in others)
            return f"rank {one.rank} {one.doing}, for which it needs all ranks, and {texts}", SAME_STEPS
    return None


def _whose(ranks: Sequence[int], standings: Sequence[Standing]) -> str:
    return "the ranks'" if len(ranks) == len(standings) else f"in the process group of {ranks_named(ranks)}, the"


def _collectives(number: int) -> str:
    return f"{number} collective{'' if number == 1 else 's'}"


def _th(number: int) -> str:
    """Return an ordinal number, such as "1st" or "12th"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def missing_ranks(one: Standing, standings: Sequence[Standing]) -> set[int]:
    """Return the ranks that a rank needs in the collectives in which it waits, and that have not come there, or have
    come with another collective.
    """
    if not one.stands_in:
        return {o.rank for o in _not_in_the_same(one, standings)}
    found: set[int] = set()
    for c in one.stands_in:
        if c.kind in OF_TWO:
            others = _peers(one, c, standings)
            found |= set() if any(_answers(other, one.rank, c) for other in others) else {o.rank for o in others}
            continue
        members = [standings[rank] for rank in c.ranks if rank < len(standings)]
        counts = {o.rank: _count(o, c) for o in members if o is not one}
        found |= {rank for rank, count in counts.items() if count is None or count < c.place_in_group}
        found |= set(c.ranks) - {one.rank} if first_difference(members, c.group) else set()
    return found


def _peers(one: Standing, c: Collective, standings: Sequence[Standing]) -> list[Standing]:
    return [standings[c.peer]] if 0 <= c.peer < len(standings) else [o for o in standings if o is not one]


def _not_in_the_same(one: Standing, standings: Sequence[Standing]) -> list[Standing]:
    """Return the ranks that do not wait in the same unrecorded collective as `one`."""
    others = [o for o in standings if o is not one and (o.stands_in or o.state != "collective")]
    return others or [o for o in standings if o.doing.partition(" at ")[0] != one.doing.partition(" at ")[0]]

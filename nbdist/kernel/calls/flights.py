"""Collectives that C++ calls, from torch's flight recorders: nbdist's own records do not have them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from ...wire.recording import FLIGHT, OF_TWO, Collective
from .standings import Standing

_LINE = re.compile(rf"^{FLIGHT}(.*)$", re.M)
#: torch's names of the types that the flight recorder names otherwise.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
#: The name of the group of all ranks.
_WORLD = "0"


def parse(answer: str, world_size: int) -> list[Collective] | None:
    """Return the collectives of the group of all ranks in a rank's answer to a request for its stack; None if the
    rank has not read its flight recorder.
    """
    line = _LINE.search(answer)
    if line is None:
        return None
    entries = [entry for entry in json.loads(line[1]) if entry[0] == _WORLD]
    newest = max((entry[1] for entry in entries), default=0)
    found = []
    for _, group, number, kind, elements, dtype, ended in entries:
        if group != newest:  # of a group that the ranks have left
            continue
        one = Collective(
            number=number,
            kind=kind,
            group=_WORLD,
            ranks=range(world_size),
            place_in_group=number,
            elements=elements if dtype else -1,
            dtype=_DTYPES.get(dtype, dtype.lower()),
            peer=-1,
            file="",
            line=0,
            begin=0.0,
            end=0.0 if ended else None,
            waits=not ended,
            main_thread=True,
            raised=False,
        )
        found.append(one)
    return found


def needs_flights(standings: Sequence[Standing]) -> bool:
    """Return whether a rank waits in a collective that C++ has called."""
    return any(one.state == "collective" and not one.stands_in for one in standings)


def with_flights(standings: Sequence[Standing]) -> Sequence[Standing]:
    """Return the ranks with the collectives of their flight recorders, if all ranks have read theirs and one of them
    waits in a collective that C++ has called.
    """
    if not needs_flights(standings) or any(one.flight is None for one in standings):
        return standings
    return [_with_flight(one, one.flight or ()) for one in standings]


def _with_flight(one: Standing, flight: Sequence[Collective]) -> Standing:
    """Return a rank with the collectives of its flight recorder. Its stack has the line of the collective."""
    pending = one.state not in ("returned", "absent")
    begun = [c if pending else c._replace(waits=False) for c in flight]
    place = one.doing.partition(" at ")[2]
    places = {c.number: place for c in begun if c.waits}
    begun += [c for c in one.stands_in if c.kind in OF_TWO]
    return replace(one, begun=begun, places={**one.places, **places})

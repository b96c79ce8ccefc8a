"""The known state of a rank at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...wire.recording import OF_TWO, Collective


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
    - "nothing comes": waits for what only its own threads or other ranks could do, such as the release of a lock; all
      threads of the rank wait
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
    awaits: str = ""
    """In the state "nothing comes": "lock" for a lock, an event or a queue, "pipe" for data in a pipe or socket, "key"
    for a key in the store of the process group."""
    wakers: frozenset[int] = frozenset()
    """In this state: the other ranks that could end the wait."""
    flight: Sequence[Collective] | None = None
    """The collectives that torch's flight recorder has, if it was read."""
    active: bool = False
    """True if other threads of the rank may do something."""

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
        peer += f" (in {one.library})" if one.library else ""
        place = self.places.get(one.number, "")
        return f"{one.what()}{peer}" + (f" at {place}" if place else "")

    def elsewhere(self) -> str:
        """Describe what the rank does while others wait for it."""
        return {"returned": "has returned", "absent": "takes no part in this call"}.get(self.state, self.doing)

"""Big data on a node of a cluster: received from the driver or from another node, and passed on to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ....system.segments import Segment

#: Bytes of big data that are sent at once.
CHUNK = 16 << 20


class Branch(NamedTuple):
    """A node that gets data from another node, and the nodes to which it passes them on."""

    host: Any
    numbers: list[int]
    """The numbers of this node and of all nodes below it in the tree."""
    below: list[Branch]


class Stored:
    """The segments of a node, by name, for all of its ranks."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}
        self._passing: list[tuple[Branch, Any]] = []
        """Nodes that take a part of a segment from this one, and their answers."""
        self.received = 0
        """The number of bytes received."""

    def __getitem__(self, key: str) -> Segment:
        return self._segments[key]

    def forget_all_but(self, keys: Iterable[str]) -> None:
        for key in set(self._segments) - set(keys):
            self._segments.pop(key).close()

    def store(self, key: str, size: int, start: int, data: Any, below: Sequence[Branch]) -> set[int]:
        """Store a part of a segment and pass it on. All parts are stored before the segment is delivered.

        Returns the numbers of the nodes below this one that the part has not reached.
        """
        if below:
            import ray

            part = ray.put(data)  # here, so that the next nodes get it from this one
            passing = [(one, one.host.store.remote(key, size, start, part, one.below)) for one in below]
        else:
            passing = []
        if key not in self._segments:
            self._segments[key] = Segment.create(size)
        self._segments[key].write(memoryview(data), start)
        self.received += len(data)
        # The next part is taken while this one is still on its way.
        waiting, self._passing = self._passing, passing
        if start + len(data) == size:
            waiting, self._passing = waiting + passing, []
        return set().union(*(_missed(one, stored) for one, stored in waiting))


def _missed(branch: Branch, stored: Any) -> set[int]:
    """Return the nodes of a branch that a part has not reached."""
    import ray

    try:
        return set(ray.get(stored))
    except ray.exceptions.RayError:
        return set(branch.numbers)

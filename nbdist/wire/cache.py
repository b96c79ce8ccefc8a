"""Data that a session has sent: buffers with the same bytes are not sent again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..system.segments import BufferLocation, Segment

#: Buffers of at least this many bytes are not sent again in a session while their content is the same.
KEPT = 1 << 20


class SentCache:
    """The buffers of at least `KEPT` bytes in the last parcel, and their locations."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Segment, int]]] = {}  # by size in bytes

    def find(self, view: memoryview) -> tuple[Segment, int] | None:
        """Return segment and position of the bytes of `view`; None if they were not sent."""
        for segment, position in self._found.get(view.nbytes, []):
            if segment.holds(view, position):
                return segment, position
        return None

    def keep(self, segments: Sequence[Segment], spans: Iterable[BufferLocation]) -> None:
        """Remember the locations of these buffers and forget all others; close segments that are not needed any
        more."""
        before = self._segments() | {id(segment): segment for segment in segments}
        self._found = {}
        for span in spans:
            if span.size >= KEPT:
                self._found.setdefault(span.size, []).append((segments[span.segment], span.start))
        now = self._segments()
        for number, segment in before.items():
            if number not in now:
                segment.close()

    def _segments(self) -> dict[int, Segment]:
        return {id(segment): segment for found in self._found.values() for segment, _ in found}

    def close(self) -> None:
        """Close all segments."""
        self.keep([], [])

"""Parcels between kernel and ranks: a pickle and its big buffers, which are in shared segments."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Iterable, Sequence

from ..system.copying import layout, own_memory
from ..system.free_memory import check_fits
from ..system.segments import BufferLocation, Segment
from .cache import KEPT, SentCache

#: Pickles up to this many bytes go through the socket itself.
INLINE = 64 * 1024
#: Segments of one parcel: each is a descriptor, and a message takes some two hundred.
MOST_SEGMENTS = 64


class Parcel:
    """A pickle and its buffers.

    `inline` is the pickle if it is small; otherwise it is in the first of the `spans`. The spans are in the `segments`,
    whose descriptors belong to the parcel. `buffers` are buffers that were sent in another way.
    """

    def __init__(self, inline: bytes | None, spans: Sequence[BufferLocation], segments: Sequence[Segment]) -> None:
        self.inline, self.spans, self.segments = inline, spans, segments
        self.buffers: list[memoryview] = []

    @property
    def size(self) -> int:
        """Return the total number of bytes."""
        return len(self.inline or b"") + sum(span.size for span in self.spans)

    def open(self, own: bool = False) -> tuple[memoryview, list[memoryview]]:
        """Return the pickle and the buffers: writable views of private mappings. Closes the descriptors.

        With `own`, for an answer, buffers that share a segment are copied, so that keeping one buffer does not keep the
        others. Raises `MemoryError` if the objects in the pickle, which need about its size, do not fit.
        """
        try:
            if own and self.inline is None:
                check_fits(self.spans[0].size, "the value that the function returned")
            wholes = [segment.private() for segment in self.segments]
        finally:
            self.close()
        views = [wholes[span.segment][span.start : span.start + span.size] for span in self.spans]
        if own:
            shared = collections.Counter(span.segment for span in self.spans)
            first = int(self.inline is None)  # the pickle is read and not kept
            for number, span in enumerate(self.spans[first:], first):
                if shared[span.segment] > 1:
                    views[number], view = own_memory(span.size), views[number]
                    views[number][:] = view
        pickled = views.pop(0) if self.inline is None else memoryview(self.inline)
        return pickled, self.buffers or views

    def close(self) -> None:
        """Close the descriptors. Mappings stay."""
        for segment in self.segments:
            segment.close()


def pack(
    pickled: memoryview,
    buffers: Iterable[pickle.PickleBuffer],
    cache: SentCache | None = None,
    what: str = "what is sent between notebook and ranks",
) -> Parcel:
    """Put a pickle and its buffers into a parcel. Each buffer is written once; buffers in the `cache` are not written.

    Big buffers and small ones are in different segments. Without a cache, as in answers, each big buffer has a segment
    of its own, because memory stays while any part of its segment is in use. Raises `MemoryError`, with `what` as the
    name of the data, if the buffers do not fit.
    """
    inline = bytes(pickled) if pickled.nbytes <= INLINE else None
    views = [buffer.raw() for buffer in buffers]
    if inline is None:
        views.insert(0, pickled)
    if not views:
        return Parcel(inline, [], [])
    found = [cache.find(view) if cache is not None and view.nbytes >= KEPT else None for view in views]
    segments = list({id(hit[0]): hit[0] for hit in found if hit is not None}.values())
    if len(segments) > MOST_SEGMENTS - 2:
        found, segments = [None] * len(views), []
    spans = [
        BufferLocation(-1, 0, 0) if hit is None else BufferLocation(segments.index(hit[0]), hit[1], 0) for hit in found
    ]
    new = [number for number, hit in enumerate(found) if hit is None]
    check_fits(sum(views[number].nbytes for number in new), what)
    old = len(segments)
    try:
        for group in _groups(views, new, apart=cache is None):
            starts, end = layout(views[number].nbytes for number in group)
            segments.append(Segment.create(max(end, 1), what))
            for number, start in zip(group, starts, strict=True):
                spans[number] = BufferLocation(len(segments) - 1, start, 0)
                segments[-1].write(views[number], start)
    except BaseException:
        for segment in segments[old:]:
            segment.close()
        raise
    spans = [span._replace(size=view.nbytes) for span, view in zip(spans, views, strict=True)]
    # A parcel may wait while later ones change what is in the cache, so its descriptors are its own.
    own = segments if cache is None else [segment.duplicate() for segment in segments]
    if cache is not None:
        cache.keep(segments, spans)
    return Parcel(inline, spans, own)


def _groups(views: Sequence[memoryview], numbers: Iterable[int], apart: bool) -> list[list[int]]:
    """Divide views among segments, and return the indices of each segment's views.

    Small views share a segment. Big views share another one; with `apart`, each has its own.
    """
    small: list[int] = []
    big: list[int] = []
    for number in numbers:
        (big if views[number].nbytes >= KEPT else small).append(number)
    alone = MOST_SEGMENTS - 2 if apart else 0
    groups = [small, *([number] for number in big[:alone]), big[alone:]]
    return [group for group in groups if group]

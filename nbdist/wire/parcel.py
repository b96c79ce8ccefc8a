"""Parcels between kernel and ranks: a pickle and its big buffers, these in shared segments."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence

from ..system.copying import layout
from ..system.segments import Segment, Span
from .cache import KEPT, SentCache

#: Pickles up to this many bytes go through the socket itself.
INLINE = 64 * 1024
#: Segments of one parcel: each is a descriptor, and a message takes some two hundred.
MOST_SEGMENTS = 64


class Parcel:
    """A pickle and its buffers.

    `inline` is the pickle if it is small; else it is in the first of the `spans`. These are in the `segments`, whose
    descriptors are the parcel's own. Buffers that came by another way are in `buffers`.
    """

    def __init__(self, inline: bytes | None, spans: Sequence[Span], segments: Sequence[Segment]) -> None:
        self.inline, self.spans, self.segments = inline, spans, segments
        self.buffers: list[memoryview] = []

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.inline or b"") + sum(span.size for span in self.spans)

    def open(self) -> tuple[memoryview, list[memoryview]]:
        """The pickle and the buffers: writable views of private mappings. Closes the descriptors."""
        try:
            wholes = [segment.private() for segment in self.segments]
        finally:
            self.close()
        views = [wholes[span.segment][span.start : span.start + span.size] for span in self.spans]
        pickled = views.pop(0) if self.inline is None else memoryview(self.inline)
        return pickled, self.buffers or views

    def close(self) -> None:
        """Give up the descriptors; mappings live on."""
        for segment in self.segments:
            segment.close()


def pack(pickled: memoryview, buffers: Iterable[pickle.PickleBuffer], cache: SentCache | None = None) -> Parcel:
    """Put a pickle and its buffers into a parcel: each is written once, those in the `cache` not even that."""
    inline = bytes(pickled) if pickled.nbytes <= INLINE else None
    views = [buffer.raw() for buffer in buffers]
    if inline is None:
        views.insert(0, pickled)
    if not views:
        return Parcel(inline, [], [])
    found = [cache.find(view) if cache is not None and view.nbytes >= KEPT else None for view in views]
    segments = list({id(hit[0]): hit[0] for hit in found if hit is not None}.values())
    if len(segments) >= MOST_SEGMENTS:
        found, segments = [None] * len(views), []
    starts, end = layout(view.nbytes if hit is None else 0 for view, hit in zip(views, found, strict=True))
    spans = [
        Span(len(segments), start, view.nbytes) if hit is None else Span(segments.index(hit[0]), hit[1], view.nbytes)
        for view, hit, start in zip(views, found, starts, strict=True)
    ]
    if None in found:
        new = Segment.create(max(end, 1))
        segments.append(new)
        try:
            for view, hit, span in zip(views, found, spans, strict=True):
                if hit is None:
                    new.write(view, span.start)
        except BaseException:
            new.close()
            raise
    # A parcel may wait while later ones change what is in the cache, so its descriptors are its own.
    own = segments if cache is None else [segment.duplicate() for segment in segments]
    if cache is not None:
        cache.keep(segments, spans)
    return Parcel(inline, spans, own)

"""Parcels between kernel and ranks: a pickle and its big buffers, these in anonymous shared segments.

A segment has no name: it is a memfd (an unlinked file where there is no memfd), so it is gone with its last
descriptor and mapping, whatever kills its users. Readers map it copy-on-write: writable, private, not copied.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import pickle
import select
import socket
import struct
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .affinity import usable_cores

#: Pickles up to this many bytes go through the socket itself.
INLINE = 64 * 1024
#: Buffers of at least this many bytes are not sent again in a session while their content is the same.
KEPT = 1 << 20

_ONE_CORE = 8 << 20  # bytes that one core compares as fast as several
_ALIGNMENT = 64  # what numpy and torch want of a buffer's address
_MOST_SEGMENTS = 64  # of one parcel: each is a descriptor, and a message takes some two hundred


def readable(fd: Any, seconds: float = 0.0) -> bool:
    """Whether there is something to read, or the end, at `fd` within so many seconds."""
    poll = select.poll()  # select.select knows only the first 1024 descriptors
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Segment:
    """Shared memory without a name."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._view: memoryview | None = None

    @staticmethod
    def create(size: int) -> Segment:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("nbdist", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.truncate(fd, size)
        return Segment(fd, size)

    def write(self, view: memoryview, position: int) -> None:
        # Not a memcpy into a mapping: pages need no zeroing first, and a full memory is an error, not a SIGBUS.
        while view.nbytes:
            done = os.pwrite(self.fd, view[: 1 << 30], position)
            view, position = view[done:], position + done

    def private(self) -> memoryview:
        """A new mapping whose writes nobody else sees."""
        return memoryview(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY))

    def holds(self, view: memoryview, position: int) -> bool:
        """Whether the bytes at `position` are those of `view`."""
        if self._view is None:
            self._view = memoryview(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ))
        return same_bytes(self._view[position : position + view.nbytes], view)

    def duplicate(self) -> Segment:
        """The same memory, with a descriptor of its own."""
        return Segment(os.dup(self.fd), self.size)

    def close(self) -> None:
        """Give up this process's descriptor; mappings live on."""
        fd, self.fd = self.fd, -1
        self._view = None
        if fd >= 0:
            os.close(fd)


class Place(NamedTuple):
    """Where a buffer lies: the number of its segment, its start and size in bytes, and whether it is read-only."""

    segment: int
    start: int
    size: int
    readonly: bool


class Parcel:
    """A pickle and its buffers.

    `inline` is the pickle if it is small; else it is in the first of the `places`. These are in the `segments`, whose
    descriptors are the parcel's own. Buffers that came by another way are `lent`.
    """

    def __init__(self, inline: bytes | None, places: Sequence[Place], segments: Sequence[Segment]) -> None:
        self.inline, self.places, self.segments = inline, places, segments
        self.lent: list[memoryview] = []

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.inline or b"") + sum(place.size for place in self.places)

    def open(self) -> tuple[memoryview, list[memoryview]]:
        """The pickle and the buffers: writable views of private mappings. Closes the descriptors."""
        try:
            wholes = [segment.private() for segment in self.segments]
        finally:
            self.close()
        views = [wholes[place.segment][place.start : place.start + place.size] for place in self.places]
        views = [v.toreadonly() if place.readonly else v for v, place in zip(views, self.places, strict=True)]
        pickled = views.pop(0) if self.inline is None else memoryview(self.inline)
        return pickled, self.lent or views

    def close(self) -> None:
        """Give up the descriptors; mappings live on."""
        for segment in self.segments:
            segment.close()


class Shelf:
    """What a session has sent last, so that it is not sent again while it is the same, byte for byte."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[Segment, int]]] = {}  # by size in bytes

    def find(self, view: memoryview) -> tuple[Segment, int] | None:
        """Segment and position where the bytes of `view` lie already."""
        for segment, position in self._places.get(view.nbytes, []):
            if segment.holds(view, position):
                return segment, position
        return None

    def keep(self, segments: Sequence[Segment], places: Iterable[Place]) -> None:
        """Remember where these buffers lie and forget all others; closes the segments with nothing to remember."""
        before = self._segments() | {id(segment): segment for segment in segments}
        self._places = {}
        for place in places:
            if place.size >= KEPT:
                self._places.setdefault(place.size, []).append((segments[place.segment], place.start))
        now = self._segments()
        for number, segment in before.items():
            if number not in now:
                segment.close()

    def _segments(self) -> dict[int, Segment]:
        return {id(segment): segment for found in self._places.values() for segment, _ in found}

    def close(self) -> None:
        """Give up all segments."""
        self.keep([], [])


def pack(pickled: memoryview, buffers: Iterable[pickle.PickleBuffer], shelf: Shelf | None = None) -> Parcel:
    """Put a pickle and its buffers into a parcel: each is written once, those on the `shelf` not even that."""
    inline = bytes(pickled) if pickled.nbytes <= INLINE else None
    views = [buffer.raw() for buffer in buffers]
    if inline is None:
        views.insert(0, pickled)
    if not views:
        return Parcel(inline, [], [])
    found = [shelf.find(view) if shelf is not None and view.nbytes >= KEPT else None for view in views]
    segments = list({id(hit[0]): hit[0] for hit in found if hit is not None}.values())
    if len(segments) >= _MOST_SEGMENTS:
        found, segments = [None] * len(views), []
    places: list[Place] = []
    end = 0
    for view, hit in zip(views, found, strict=True):
        if hit is not None:
            places.append(Place(segments.index(hit[0]), hit[1], view.nbytes, view.readonly))
        else:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + view.nbytes
            places.append(Place(len(segments), start, view.nbytes, view.readonly))
    if None in found:
        new = Segment.create(max(end, 1))
        segments.append(new)
        try:
            for view, hit, place in zip(views, found, places, strict=True):
                if hit is None:
                    new.write(view, place.start)
        except BaseException:
            new.close()
            raise
    # A parcel may wait while later ones change what is on the shelf, so its descriptors are its own.
    lent = segments if shelf is None else [segment.duplicate() for segment in segments]
    if shelf is not None:
        shelf.keep(segments, places)
    return Parcel(inline, places, lent)


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two buffers hold the same bytes: memcmp, at the speed of the memory, on several cores if it is much."""
    if a.nbytes != b.nbytes:
        return False
    import numpy as np

    left, right = np.frombuffer(a, dtype=np.uint8).ctypes.data, np.frombuffer(b, dtype=np.uint8).ctypes.data
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def same(part: range) -> bool:
        return bool(memcmp(left + part.start, right + part.start, len(part)) == 0)

    whole = range(a.nbytes)
    if len(whole) < _ONE_CORE:
        return same(whole)
    count = min(len(usable_cores()), 4)
    step = -(-len(whole) // count)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return all(pool.map(same, [whole[start : start + step] for start in range(0, len(whole), step)]))


# ----------------------------------------------------------------------------------------------------- channels


class Channel:
    """Messages over a Unix socket: a tuple of plain values, with a parcel or descriptors beside it if need be."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: tuple[Any, ...], parcel: Parcel | None = None, fds: Iterable[int] = ()) -> None:
        """Send `message`. Raises `OSError` when the other end is gone."""
        fds = list(fds)
        about = None
        if parcel is not None:
            about = (parcel.inline, [tuple(place) for place in parcel.places], [s.size for s in parcel.segments])
            fds += [segment.fd for segment in parcel.segments]
        body = pickle.dumps((message, about), protocol=5)
        head = _MESSAGE.pack(len(body), len(fds))
        sent = socket.send_fds(self.sock, [head, body], fds)
        if sent < len(head) + len(body):
            self.sock.sendall((head + body)[sent:])

    def receive(self) -> tuple[tuple[Any, ...], Parcel | None, list[int]]:
        """The next message, its parcel, its descriptors. Raises `EOFError` when the other end is gone."""
        # The descriptors come with the first byte, so they are asked for with the head and never with the body.
        head, fds, _, _ = socket.recv_fds(self.sock, _MESSAGE.size, _MOST_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            while len(head) < _MESSAGE.size:
                head += self._some(_MESSAGE.size - len(head))
            size, count = _MESSAGE.unpack(head)
            if len(fds) != count:
                raise OSError("descriptors were lost on the way: is the limit of open files (ulimit -n) reached?")
            body = bytearray()
            while len(body) < size:
                body += self._some(min(size - len(body), 1 << 20))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        message, about = pickle.loads(body)
        parcel = None
        if about is not None:
            inline, places, sizes = about
            fds, own = fds[: len(fds) - len(sizes)], fds[len(fds) - len(sizes) :]
            segments = [Segment(fd, size) for fd, size in zip(own, sizes, strict=True)]
            parcel = Parcel(inline, [Place(*place) for place in places], segments)
        return message, parcel, fds

    def _some(self, size: int) -> bytes:
        data = self.sock.recv(size)
        if not data:
            raise EOFError("the other end of the channel is closed")
        return data

    def close(self) -> None:
        self.sock.close()


_MESSAGE = struct.Struct("<QI")
_MOST_FDS = _MOST_SEGMENTS + 8

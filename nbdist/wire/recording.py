"""The last collectives of each rank in shared memory: a rank writes them, and the kernel reads them at any time."""

from __future__ import annotations

import itertools
import mmap
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..system.segments import Segment

#: The number of collectives that are kept for each rank.
KEPT = 1000
#: Number of collectives begun, bytes of texts, number of the first collective in the current process groups.
_HEAD = struct.Struct("<qqq")
#: See `Recorder.begin` for the fields.
_ENTRY = struct.Struct("<qddqiiiHHHHHHxxxx")
_END, _FLAGS = struct.Struct("<d"), struct.Struct("<H")
_END_AT, _FLAGS_AT = 16, 52  # byte offsets in an entry
_LENGTH = struct.Struct("<H")
_TEXTS = _HEAD.size + KEPT * _ENTRY.size
#: Bytes of memory for each rank: a multiple of the page size, which is at most 64 KiB.
SIZE = 128 << 10
#: Bits of an entry's flags: a thread waits in the collective; the thread is not the main thread; the collective raised.
_WAITS, _OTHER_THREAD, _RAISED = 1, 2, 4
#: The beginning of the line of a rank's answer that has the collectives of torch's flight recorder, as JSON.
FLIGHT = "Flight recorder: "
#: Operations between two ranks. They have no number in their group.
OF_TWO = frozenset({"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"})


class Collective(NamedTuple):
    """A collective that a rank has begun."""

    number: int
    """The number among all collectives of the rank, from 1."""
    kind: str
    """The function of `torch.distributed`."""
    group: str
    """The name of its process group."""
    ranks: Sequence[int]
    """The ranks of that group."""
    place_in_group: int
    """The number among the collectives that the rank has begun in this group, from 1; 0 for point-to-point operations,
    such as `send` and `recv`."""
    elements: int
    """The number of elements of the first tensor; -1 without a tensor."""
    dtype: str
    peer: int
    """The other rank of a `send` or `recv`, or the root; -1 for any rank, and for collectives without a root."""
    file: str
    line: int
    """The innermost line outside libraries; 0 if there is none."""
    begin: float
    """The time of the start, in seconds of this machine's `time.monotonic`."""
    end: float | None
    """The time of the end; None while the end is not known."""
    waits: bool
    """True while a thread waits in the collective."""
    main_thread: bool
    raised: bool
    tag: int = 0
    """The tag of a point-to-point operation; 0 for collectives."""
    polled: float | None = None
    """The time of the last call of `is_completed`, if it returned False and the end is not known."""
    library: str = ""
    """The function of a library that the line called, such as "Metric.compute of torchmetrics"; empty if the line
    called `torch.distributed` itself."""

    def what(self) -> str:
        """Describe the collective, such as "all_reduce of 1,000 float32"."""
        if self.elements < 0:
            return self.kind
        return f"{self.kind} of {self.elements:,} {self.dtype}"


def group_named(name: str, ranks: Iterable[int]) -> str:
    """Return the text that stands for a process group in a recording."""
    return f"{name}|{','.join(map(str, ranks))}"


class Recorder:
    """Writer in a rank: it records the beginning and the end of collectives, in about a microsecond each."""

    def __init__(self, fd: int, rank: int) -> None:
        """Map the rank's part of the memory behind `fd`, and close `fd`."""
        segment = Segment(fd, SIZE)
        try:
            self._memory = mmap.mmap(segment.fd, SIZE, offset=rank * SIZE)
        finally:
            segment.close()
        self._numbers = itertools.count(1)
        self._texts = {"": 0}
        self._adding = threading.Lock()
        self._texts_end = _TEXTS
        self._counts: dict[str, int] = {}
        self._last, self._first = 0, 1

    def forget_groups(self) -> None:
        """Restart the numbers in groups at 1, because the rank has joined new process groups."""
        self._counts.clear()
        self._first = self._last + 1
        _HEAD.pack_into(self._memory, 0, self._last, self._texts_end - _TEXTS, self._first)

    def begin(
        self,
        kind: str,
        group: str,
        elements: int,
        dtype: str,
        peer: int,
        file: str,
        line: int,
        main_thread: bool,
        tag: int = 0,
        library: str = "",
    ) -> int:
        """Record the start of a collective in this thread, and return its number.

        Args:
            kind, elements, dtype, peer, file, line, tag, library: The fields of `Collective`.
            group: The text that `group_named` returns.
            main_thread: Whether this thread is the rank's main thread.
        """
        number = next(self._numbers)
        if kind in OF_TWO:
            count = tag  # in the same field: it has no number in its group
        else:
            self._counts[group] = count = self._counts.get(group, 0) + 1
        text = self._text
        _ENTRY.pack_into(
            self._memory,
            _place(number),
            number,
            time.monotonic(),
            0.0,
            elements,
            count,
            peer,
            line,
            text(kind),
            text(group),
            text(dtype),
            text(file),
            _WAITS if main_thread else _WAITS | _OTHER_THREAD,
            text(library),
        )
        self._last = number
        _HEAD.pack_into(self._memory, 0, number, self._texts_end - _TEXTS, self._first)
        return number

    def leave(self, number: int) -> None:
        """Record that no thread waits in the collective any more, although it may still be running."""
        self._flag(number, 0, _WAITS)

    def enter(self, number: int, main_thread: bool) -> None:
        """Record that this thread waits for the end of the collective."""
        self._flag(number, _WAITS | (0 if main_thread else _OTHER_THREAD), _WAITS | _OTHER_THREAD)

    def poll(self, number: int, main_thread: bool) -> None:
        """Record that this thread has found the collective unfinished. A time of the end below 0 means this."""
        _END.pack_into(self._memory, _place(number) + _END_AT, -time.monotonic())
        self._flag(number, 0 if main_thread else _OTHER_THREAD, _OTHER_THREAD)

    def end(self, number: int, raised: bool = False) -> None:
        """Record the end of the collective."""
        _END.pack_into(self._memory, _place(number) + _END_AT, time.monotonic())
        self._flag(number, _RAISED if raised else 0, _WAITS)

    def _flag(self, number: int, add: int, remove: int) -> None:
        at = _place(number) + _FLAGS_AT
        (flags,) = _FLAGS.unpack_from(self._memory, at)
        _FLAGS.pack_into(self._memory, at, flags & ~remove | add)

    def _text(self, text: str) -> int:
        """Return the number of a text, and store the text if it is new. Without room for it, return 0, the number
        of the empty text.
        """
        found = self._texts.get(text)
        return self._add(text) if found is None else found

    def _add(self, text: str) -> int:
        with self._adding:
            data = text.encode(errors="replace")
            end = self._texts_end + _LENGTH.size + len(data)
            if text not in self._texts and end <= SIZE and len(data) < 1 << 16:
                _LENGTH.pack_into(self._memory, self._texts_end, len(data))
                self._memory[self._texts_end + _LENGTH.size : end] = data
                self._texts_end = end
                self._texts[text] = len(self._texts)
            return self._texts.get(text, 0)


class Recording:
    """Reader in the kernel: the collectives that the ranks record."""

    def __init__(self, world_size: int) -> None:
        self.segment: Segment | None = Segment.create(world_size * SIZE)
        """The memory to send to the ranks; None when all ranks have it."""
        self._memory = self.segment.shared()

    def handed_over(self) -> None:
        """Close the descriptor: all ranks have one of their own. The memory stays mapped."""
        if self.segment is not None:
            self.segment.close()
            self.segment = None

    def close(self) -> None:
        """Unmap the memory, which holds a descriptor: the exception of a call may keep this object for a long time."""
        self.handed_over()
        self._memory.close()

    def count(self, rank: int) -> int:
        """Return how many collectives a rank has begun."""
        return int(_HEAD.unpack_from(self._memory, rank * SIZE)[0])

    def read(self, rank: int) -> list[Collective]:
        """Return the last collectives of a rank in its current process groups, in the order in which they began."""
        part = self._memory[rank * SIZE : (rank + 1) * SIZE]
        _, size, first = _HEAD.unpack_from(part, 0)
        texts = _texts(part, size)
        entries = sorted(_ENTRY.unpack_from(part, _place(number)) for number in range(KEPT))
        return [_collective(entry, texts) for entry in entries if entry[0] >= max(1, first)]


def _place(number: int) -> int:
    return _HEAD.size + number % KEPT * _ENTRY.size


def _texts(part: bytes, size: int) -> Mapping[int, str]:
    found, at = {0: ""}, _TEXTS
    while at < _TEXTS + size:
        (length,) = _LENGTH.unpack_from(part, at)
        at += _LENGTH.size
        found[len(found)] = part[at : at + length].decode(errors="replace")
        at += length
    return found


def _collective(entry: Sequence[float], texts: Mapping[int, str]) -> Collective:
    number, begin, end, elements, count, peer, line, kind, group, dtype, file, flags, library = entry
    name, _, ranks = texts.get(int(group), "").partition("|")
    what = texts.get(int(kind), "")
    of_two = what in OF_TWO
    return Collective(
        number=int(number),
        kind=what,
        group=name,
        ranks=[int(rank) for rank in ranks.split(",") if rank],
        place_in_group=0 if of_two else int(count),
        tag=int(count) if of_two else 0,
        elements=int(elements),
        dtype=texts.get(int(dtype), ""),
        peer=int(peer),
        file=texts.get(int(file), ""),
        line=int(line),
        begin=begin,
        end=end if end > 0 else None,
        polled=-end if end < 0 else None,
        waits=bool(int(flags) & _WAITS),
        main_thread=not int(flags) & _OTHER_THREAD,
        raised=bool(int(flags) & _RAISED),
        library=texts.get(int(library), ""),
    )

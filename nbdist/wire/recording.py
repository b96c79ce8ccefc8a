"""The last collectives of each rank, in memory that the kernel reads whatever the rank is doing: both ends of that."""

from __future__ import annotations

import itertools
import mmap
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..system.segments import Segment

#: Collectives that are kept of a rank.
KEPT = 1000
#: How many have begun; bytes of texts; the first one in the process groups that there are now.
_HEAD = struct.Struct("<qqq")
#: See `Recorder.begin` for the fields.
_ENTRY = struct.Struct("<qddqiiiHHHHHxxxxxx")
_END, _FLAGS = struct.Struct("<d"), struct.Struct("<H")
_END_AT, _FLAGS_AT = 16, 52  # where they are in an entry
_LENGTH = struct.Struct("<H")
_TEXTS = _HEAD.size + KEPT * _ENTRY.size
#: Bytes of a rank's part: a multiple of a page, whose size is 64 KiB at most.
SIZE = 128 << 10
#: Bits of an entry's flags: a thread stands in the collective; that is not the rank's main thread; it has raised.
_WAITS, _OTHER_THREAD, _RAISED = 1, 2, 4
#: Collectives of two ranks, which have no number in their group.
OF_TWO = frozenset({"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"})


class Collective(NamedTuple):
    """A collective that a rank has begun."""

    number: int
    """Among those of the rank, from 1."""
    kind: str
    """The function of `torch.distributed`."""
    group: str
    """The name of its process group."""
    ranks: Sequence[int]
    """The ranks of that group."""
    place_in_group: int
    """Its number among those that the rank has begun in this group, from 1; 0 for `send`, `recv` and their like."""
    elements: int
    """Of the first tensor; -1 where there is none."""
    dtype: str
    peer: int
    """The rank to which is sent, from which is received, or that is the root; -1 for any, and where there is none."""
    file: str
    line: int
    """The innermost line that is in no library; 0 where there is none."""
    begin: float
    """Seconds, as `time.monotonic` has them on this machine."""
    end: float | None
    """None as long as nobody knows that it has ended."""
    waits: bool
    """Whether a thread stands in it."""
    main_thread: bool
    raised: bool

    def what(self) -> str:
        """Return the collective in words, such as "all_reduce of 1,000 float32"."""
        if self.elements < 0:
            return self.kind
        return f"{self.kind} of {self.elements:,} {self.dtype}"


def group_named(name: str, ranks: Iterable[int]) -> str:
    """Return the text for a process group in a recording."""
    return f"{name}|{','.join(map(str, ranks))}"


class Recorder:
    """In a rank: notes what it begins and ends. Takes about a microsecond for each."""

    def __init__(self, fd: int, rank: int) -> None:
        """Map the rank's part of the memory at `fd`, which is closed."""
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
        """Begin at 1 again: the process groups are others from now on."""
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
    ) -> int:
        """Note a collective in which this thread stands from now on. Returns its number; see `Collective`.

        `group` is what `group_named` returns.
        """
        number = next(self._numbers)
        if kind in OF_TWO:
            count = 0
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
        )
        self._last = number
        _HEAD.pack_into(self._memory, 0, number, self._texts_end - _TEXTS, self._first)
        return number

    def leave(self, number: int) -> None:
        """Note that no thread stands in it any more, though it may go on."""
        self._flag(number, 0, _WAITS)

    def enter(self, number: int, main_thread: bool) -> None:
        """Note that this thread waits for its end."""
        self._flag(number, _WAITS | (0 if main_thread else _OTHER_THREAD), _WAITS | _OTHER_THREAD)

    def end(self, number: int, raised: bool = False) -> None:
        """Note that it has ended."""
        _END.pack_into(self._memory, _place(number) + _END_AT, time.monotonic())
        self._flag(number, _RAISED if raised else 0, _WAITS)

    def _flag(self, number: int, add: int, remove: int) -> None:
        at = _place(number) + _FLAGS_AT
        (flags,) = _FLAGS.unpack_from(self._memory, at)
        _FLAGS.pack_into(self._memory, at, flags & ~remove | add)

    def _text(self, text: str) -> int:
        """The number of a text; 0, which stands for an empty one, where there is no room for more."""
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
    """In the kernel: what the ranks note."""

    def __init__(self, world_size: int) -> None:
        self.segment: Segment | None = Segment.create(world_size * SIZE)
        """None when all ranks have it."""
        self._memory = self.segment.shared()

    def handed_over(self) -> None:
        """Give up the descriptor: the ranks have theirs, and the memory stays."""
        if self.segment is not None:
            self.segment.close()
            self.segment = None

    def close(self) -> None:
        """Give up the memory, which keeps a descriptor: an error of a call may refer to its ranks for long."""
        self.handed_over()
        self._memory.close()

    def count(self, rank: int) -> int:
        """Return how many collectives a rank has begun."""
        return int(_HEAD.unpack_from(self._memory, rank * SIZE)[0])

    def read(self, rank: int) -> list[Collective]:
        """The last collectives of a rank in the process groups that there are, in the order in which they began."""
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
    number, begin, end, elements, count, peer, line, kind, group, dtype, file, flags = entry
    name, _, ranks = texts.get(int(group), "").partition("|")
    return Collective(
        number=int(number),
        kind=texts.get(int(kind), ""),
        group=name,
        ranks=[int(rank) for rank in ranks.split(",") if rank],
        place_in_group=int(count),
        elements=int(elements),
        dtype=texts.get(int(dtype), ""),
        peer=int(peer),
        file=texts.get(int(file), ""),
        line=int(line),
        begin=begin,
        end=end or None,
        waits=bool(int(flags) & _WAITS),
        main_thread=not int(flags) & _OTHER_THREAD,
        raised=bool(int(flags) & _RAISED),
    )

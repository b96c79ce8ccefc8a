"""The journal of a named session: its records, and a reader that works while the keeper writes more.

A folder holds numbered files of records. A record is a header (magic, checksum, two sizes), a JSON object, and bytes.
Its format does not depend on the version of nbdist or Python. An incomplete record, because the keeper was killed or is
still writing, is ignored.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..system.copying import layout, own_memory

_HEADER = struct.Struct("<4sIIQ")
_MAGIC = b"nbj1"
_FILE = re.compile(r"journal-(\d{8})")
#: Bytes of buffers from which on they go into a file of their own.
APART = 1 << 20


@dataclass(frozen=True)
class Record:
    """An event of a session. `kind` is one of

    "begin", "end": of a call, or of another action, with its number `call`;
    "ranks": fresh ranks; "failed": a rank has raised or died;
    "output": bytes that a rank has written; "text": text of nbdist's own, such as a notice; "prompt": a question;
    "value": what a rank returned; "raised": the exception of the call;
    "cut": records are missing from here on; "over": the end of the session.
    """

    kind: str
    head: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[memoryview | bytes] = ()


def encode(record: Record) -> list[bytes | memoryview]:
    """Return the parts of a record in the form in which they are written."""
    sizes = [memoryview(buffer).nbytes for buffer in record.buffers]
    head = json.dumps({"kind": record.kind, "sizes": sizes, **record.head}).encode()
    check = zlib.crc32(head)
    for buffer in record.buffers:
        check = zlib.crc32(buffer, check)
    return [_HEADER.pack(_MAGIC, check, len(head), sum(sizes)), head, *record.buffers]


def decode(data: bytes | memoryview, start: int = 0) -> tuple[Record, int] | None:
    """Return the record at `start`, and the start of the next one; None if the record is incomplete."""
    if len(data) - start < _HEADER.size:
        return None
    magic, check, head_size, size = _HEADER.unpack_from(data, start)
    begin = start + _HEADER.size
    end = begin + head_size + size
    if magic != _MAGIC or len(data) < end:
        return None
    body = memoryview(data)[begin:end]
    if zlib.crc32(body) != check:
        return None
    head = json.loads(bytes(body[:head_size]))
    kind, sizes = head.pop("kind"), head.pop("sizes")
    buffers, position = [], head_size
    for one in sizes:
        buffers.append(_own(body[position : position + one]))
        position += one
    return Record(kind, head, buffers), end


def _own(view: memoryview) -> memoryview:
    own = own_memory(view.nbytes)
    own[:] = view
    return own


def numbers(folder: str) -> list[int]:
    """Return the numbers of a journal's files, the oldest first; none if the session was closed."""
    try:
        found = map(_FILE.fullmatch, os.listdir(folder))
    except FileNotFoundError:
        return []
    return sorted(int(one[1]) for one in found if one is not None)


def path(folder: str, number: int) -> str:
    """Return the path of the file with this number."""
    return os.path.join(folder, f"journal-{number:08}")


class Reader:
    """Reader of a journal, beginning with the file with the number `start`. It can be used again while the journal
    grows.

    Args:
        folder: The folder of the journal.
        start: The number of its first file. None: the oldest.
        at_end: Whether to begin after the last record.
    """

    def __init__(self, folder: str, start: int | None = None, at_end: bool = False) -> None:
        self._folder, self._fd, self._data, self._position = folder, -1, b"", 0
        found = numbers(folder)
        self._number = start or (found[-1 if at_end else 0] if found else 1)
        if at_end:
            for _ in self.read():
                pass

    def read(self) -> Iterator[Record]:
        """Yield the records that were written since the last call."""
        while self._fd >= 0 or self._open():
            yield from self._whole()
            has_next = os.path.exists(path(self._folder, self._number + 1))
            if not has_next and (os.path.exists(path(self._folder, self._number)) or not numbers(self._folder)):
                return
            yield from self._whole()  # it is complete since the next one is there
            os.close(self._fd)
            self._fd, self._data, self._position, self._number = -1, b"", 0, self._number + 1
            later = [number for number in numbers(self._folder) if number >= self._number]
            if later and later[0] > self._number:
                self._number = later[0]
                yield Record("cut", {"why": "older output was dropped (keep=)"})

    def _open(self) -> bool:
        try:
            self._fd = os.open(path(self._folder, self._number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _whole(self) -> Iterator[Record]:
        while True:
            while (found := decode(self._data, self._position)) is not None:
                self._position = found[1]  # before it is passed on: an interrupt must not have it read twice
                yield found[0]
            data = os.read(self._fd, 1 << 20)
            if not data:
                return
            self._data, self._position = self._data[self._position :] + data, 0

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


def values_path(folder: str, call: int, rank: int) -> str:
    """Return the path of a file with the big buffers of a rank's value."""
    return os.path.join(folder, f"value-{call:08}-{rank}")


def mapped(path: str, sizes: Sequence[int]) -> list[memoryview]:
    """Return the buffers of a file of values as writable views, whose changes do not reach the file."""
    starts, _ = layout(sizes)
    with open(path, "rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

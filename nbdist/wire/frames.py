"""Frames with the output of ranks for the kernel. Both ends of the pipes.

A rank's descriptors 1 and 2 are pipes to the kernel. Python's output to either stream, and its displays, go into the
first pipe as frames, so that they stay in order; C code and child processes write raw bytes between them. A frame has
at most `PIPE_BUF` bytes and is written at once, so no bytes can come between its parts. The second pipe carries only
raw bytes: the output of C code and child processes to standard error.
"""

from __future__ import annotations

import base64
import codecs
import datetime
import errno
import fcntl
import itertools
import json
import numbers
import os
import select
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

MAGIC = b"\x00\x1bnbdist\x1b\x01"  # its end is not its beginning: raw bytes before it cannot make another of it
_HEADER = struct.Struct("<10sB?HII")  # magic, kind, whether more of it follows, size, process, number there
STDOUT, STDERR, MESSAGE = range(3)
_CHUNK = select.PIPE_BUF - _HEADER.size
_OWN = 900
"""The number of the first descriptor that a rank may use for its frames: limits of open files begin at 1,024."""
_DEEPEST = 50
"""The number of levels of a display's data that are searched for keys that are not strings."""

#: What a rank's widget knows the calling cell by; the kernel puts the id of its message in the place of it.
CELL = "nbdist-cell"


class FrameWriter:
    """Writer of frames in a rank, to the file that was descriptor 1 at the start.

    Output that fits in one frame takes no lock: a signal handler that prints may interrupt any print, and a fork may
    happen while another thread holds the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # keeps the frames of one thread's long text together
        self._numbers = itertools.count()
        self._fd = 1

    def keep(self) -> None:
        """Keep writing to the current descriptor 1, even if a function replaces or changes it."""
        try:  # opened again it has flags of its own, such as O_NONBLOCK; without a reader it would wait for one
            own = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(own, True)
        except OSError:
            own = os.dup(1)
        try:  # where few programs get to that close descriptors by their numbers, or open many files
            self._fd = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, _OWN)
            os.close(own)
        except OSError:  # beyond the limit of open files
            self._fd = own

    def _write(self, data: bytes) -> None:
        """Write a frame in one piece."""
        while True:
            try:
                os.write(self._fd, data)
                return
            except BlockingIOError:  # somebody has set O_NONBLOCK, and the pipe is full
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError as exc:
                if exc.errno != errno.EBADF or self._fd == 1:
                    raise
                self._fd = 1  # a program that closes every descriptor but the standard ones

    def write(self, kind: int, data: bytes) -> None:
        number = next(self._numbers) & 0xFFFFFFFF
        if len(data) <= _CHUNK:  # nearly always, so without detours: a loop may print once a batch
            self._write(_HEADER.pack(MAGIC, kind, False, len(data), os.getpid(), number) + data)
            return
        with self._lock:
            start = 0
            while start < len(data):
                end = min(start + _CHUNK, len(data))
                # Not inside a character: another process's frame may come to lie between the two halves.
                while end < len(data) and end > start + _CHUNK - 4 and data[end] & 0xC0 == 0x80:
                    end -= 1
                header = _HEADER.pack(MAGIC, kind, end < len(data), end - start, os.getpid(), number)
                self._write(header + data[start:end])
                start = end

    def after_fork(self) -> None:
        """Replace the lock in a process that the rank has forked: another thread may have held it."""
        self._lock = threading.RLock()

    def message(self, kind: str, **content: Any) -> None:
        """Send a display message, after the output so far. Its content must consist of JSON types."""
        try:
            text = json.dumps([kind, content], default=_plain)
        except (TypeError, ValueError):  # keys that are no strings, or data that hold themselves
            text = json.dumps([kind, _with_plain_keys(content)], default=_plain)
        self.write(MESSAGE, text.encode())


def _plain(value: Any) -> Any:
    """Convert objects that JSON lacks, as a notebook's kernel does: NumPy's numbers to numbers, times to ISO format."""
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.timezone.utc)
        return aware.isoformat().replace("+00:00", "Z")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if hasattr(value, "tolist"):  # an array, a tensor
        return value.tolist()
    return list(value) if isinstance(value, Iterable) else str(value)


def _with_plain_keys(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        return str(value)
    if isinstance(value, dict):
        return {str(key): _with_plain_keys(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_plain_keys(one, depth + 1) for one in value]
    return value


def frames(kind: int, data: bytes) -> bytes:
    """Return a text or message of any length as frames, for a connection that is not a pipe."""
    parts: list[bytes] = []
    start, number = 0, next(_numbers) & 0xFFFFFFFF
    while start < len(data) or not parts:
        end = min(start + _CHUNK, len(data))
        parts.append(_HEADER.pack(MAGIC, kind, end < len(data), end - start, 0, number) + data[start:end])
        start = end
    return b"".join(parts)


#: Numbers of frames of this process that no rank has written.
_numbers = itertools.count()


class FrameReader:
    """Reader of frames in the kernel, for one pipe of a rank: it takes bytes, and yields (kind, text or message) in
    order."""

    def __init__(self, kind: int) -> None:
        self._raw = kind, 0  # what is between frames: its kind, and no process
        self._rest = b""
        # By kind and process, since a process may write between two frames of another's character.
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}
        # By process and number there: a message may also come between two frames of another of the same process.
        self._unfinished: dict[tuple[int, int], bytearray] = {}

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        text: list[bytes] = []
        source = self._raw
        for part_source, payload in self._split(self._rest + data, last=not data):
            if text and part_source != source:
                yield from self._decode(source, b"".join(text))
                text = []
            if part_source[0] == MESSAGE:
                yield MESSAGE, json.loads(payload)
            else:
                source = part_source
                text.append(payload)
        if text:
            yield from self._decode(source, b"".join(text))
        if not data:
            for source in self._decoders:
                yield from self._decode(source, b"", final=True)

    def _decode(self, source: tuple[int, int], data: bytes, final: bool = False) -> Iterator[tuple[int, str]]:
        if source not in self._decoders:
            self._decoders[source] = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        text = self._decoders[source].decode(data, final)
        if text:
            yield source[0], text

    def _split(self, data: bytes, last: bool) -> Iterator[tuple[tuple[int, int], bytes]]:
        position = 0
        while True:
            start = data.find(MAGIC, position)
            if start < 0:
                # The beginning of a frame may be here already.
                keep = 0 if last else _overlap(data, position)
                end = len(data) - keep
                if end > position:
                    yield self._raw, data[position:end]
                self._rest = data[end:]
                return
            if start > position:
                yield self._raw, data[position:start]
            begin = start + _HEADER.size
            if len(data) >= begin:
                _, kind, more, size, process, number = _HEADER.unpack_from(data, start)
            if len(data) < begin or len(data) < begin + size:
                self._rest = b"" if last else data[start:]
                return
            position = begin + size
            payload = data[begin:position]
            if kind == MESSAGE:
                whole = self._unfinished.setdefault((process, number), bytearray())
                whole += payload
                if more:
                    continue
                payload = bytes(self._unfinished.pop((process, number)))
            yield (kind, process), payload


def _overlap(data: bytes, position: int) -> int:
    """Return how many bytes at the end of `data` could be the beginning of `MAGIC`."""
    for size in range(min(len(MAGIC) - 1, len(data) - position), 0, -1):
        if data.endswith(MAGIC[:size]):
            return size
    return 0

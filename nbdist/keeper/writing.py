"""The journal of a named session as its keeper writes it: it has a bounded size, and its records are complete at any
moment."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..system.copying import layout
from ..wire.journal import APART, Record, encode, path, values_path

#: Parts of the bound: a file is dropped as a whole.
_PARTS = 16
#: Bytes of a file at most: a reader that looks for the last call reads one.
_LARGEST = 16 << 20
#: Bytes that are set aside for the end of a call on a full disk.
_RESERVE = 256 << 10
#: Kinds of records without which the outcome of a call is not known.
_NEEDED = ("begin", "end", "value", "raised", "prompt", "over")


class Journal:
    """The writer of a journal. Records can be appended from any thread. On a full disk, the journal ends early, and
    nothing is raised.

    Args:
        folder: The folder of the journal.
        keep: The largest size of all its files together, in bytes. The values of the last call are not counted.
        wake: A function that is called when there are new records.
    """

    def __init__(self, folder: str, keep: int, wake: Callable[[], None]) -> None:
        self._folder, self.keep, self._wake_readers = folder, keep, wake
        self._largest = max(1 << 12, min(_LARGEST, keep // _PARTS))
        self.lock = threading.RLock()
        """The lock that is held while records are written."""
        self._fd, self._number, self._size = -1, 0, 0
        self._cut = False  # whether the file may end with a part of a record
        self._files: collections.deque[tuple[int, int, int]] = collections.deque()  # number, size, last call in it
        self._values: list[tuple[int, str, int]] = []  # call, path, size
        self._call = 0
        self._soon: list[Callable[[], Record]] = []
        self._missing = 0  # records that the disk had no room for
        self._waiting: list[Record] = []  # of these, what is written as soon as there is room
        self._reserved = os.path.join(folder, "reserve")
        self._reserve()

    def append(self, kind: str, head: dict[str, Any], *buffers: memoryview | bytes, wake: bool = True) -> None:
        """Append a record."""
        with self.lock:
            self._append(*self._made(), Record(kind, head, buffers))
        if wake:
            self._wake_readers()

    def append_soon(self, make: Callable[[], Record]) -> None:
        """Append a record that is made and written with the next one, or by the next `flush`."""
        with self.lock:
            self._soon.append(make)

    def holds_back(self) -> bool:
        """Return whether there are records that `append_soon` has not written yet."""
        return bool(self._soon)

    def flush(self, wake: bool = False) -> None:
        """Write the appended records."""
        with self.lock:
            self._append(*self._made())
        if wake:
            self._wake_readers()

    def _made(self) -> list[Record]:
        """Return the records that were to be written soon."""
        soon, self._soon = self._soon, []
        return [make() for make in soon]

    def _append(self, *records: Record) -> None:
        for record in records:
            self._call = record.head.get("call", self._call)
        if records and not (self._catch_up() and self._write(*records)):
            for record in records:  # some may fit
                if not self._catch_up() or not self._write(record):
                    self._miss(record)

    def keep_value(self, call: int, rank: int, pickled: memoryview, views: Sequence[memoryview]) -> bool:
        """Append the value of a rank; return whether there was room for it."""
        head: dict[str, Any] = {"call": call, "rank": rank}
        if pickled.nbytes + sum(view.nbytes for view in views) < APART:
            with self.lock:
                self._call = call
                earlier = self._made()
                if self._catch_up() and self._write(*earlier, Record("value", head, (pickled, *views))):
                    return True
                self._append(*earlier, Record("value", {**head, "held": True}))
            self._wake_readers()
            return False
        self.flush()
        parts = [pickled, *views]
        starts, end = layout(part.nbytes for part in parts)
        where = values_path(self._folder, call, rank)
        try:
            fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb", buffering=0) as file:
                for part, start in zip(parts, starts, strict=True):
                    self._write_all(file.fileno(), part, start)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(where)
            self.append("value", {**head, "held": True})
            return False
        with self.lock:
            self._call = call  # an action that was stopped in the queue has a higher number, and is over already
            self._values.append((call, where, end))
            self._drop()
        self.append("value", {**head, "file": os.path.basename(where), "parts": [p.nbytes for p in parts]}, wake=False)
        return True

    @staticmethod
    def _write_all(fd: int, part: memoryview, position: int) -> None:
        part = part.cast("B")
        while part.nbytes:
            done = os.pwrite(fd, part[: 1 << 30], position)
            part, position = part[done:], position + done

    def look(self) -> None:
        """Write the records that wait for room on the disk, if there is room now."""
        with self.lock:
            waited = bool(self._waiting)
            caught_up = self._catch_up()
        if waited and caught_up:
            self._wake_readers()

    def _catch_up(self) -> bool:
        """Write the records that did not fit before, and a note that some are missing. Return True if all are
        written now.
        """
        if not self._missing and not self._waiting:
            return True
        if not self._waiting and not self._has_room():
            return False
        if self._missing:
            if not self._write(Record("cut", {"why": f"the disk was full, and {self._missing} records were lost"})):
                return False
            self._missing = 0
        while self._waiting:
            if not self._write(self._waiting[0]):
                return False
            self._waiting.pop(0)
        if self._has_room():
            self._reserve()
        return True

    def _has_room(self) -> bool:
        """Return whether the disk has room for more than a few records."""
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize > 4 * _RESERVE

    def _miss(self, record: Record) -> None:
        if record.kind not in _NEEDED:
            self._missing += 1
            return
        self._waiting.append(record)
        with contextlib.suppress(OSError):
            os.remove(self._reserved)  # for the end of the call there is room then
        self._catch_up()

    def _reserve(self) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(self._reserved, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RESERVE) if hasattr(os, "posix_fallocate") else os.truncate(fd, _RESERVE)
            finally:
                os.close(fd)

    def _write(self, *records: Record) -> bool:
        """Write records completely; return whether there was room."""
        data = memoryview(b"".join(itertools.chain.from_iterable(map(encode, records))))
        done = 0
        try:
            if self._fd < 0 or self._cut or self._size >= self._largest:
                self._next_file()
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            if done:
                # A reader may have read this part of a record. So what follows goes into the next file.
                self._cut = True
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            return False
        self._size += done
        return True

    def _next_file(self) -> None:
        number = self._number + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path(self._folder, number), flags, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
            self._files.append((self._number, self._size, self._call))
        self._fd, self._number, self._size, self._cut = fd, number, 0, False
        self._drop()

    def _drop(self) -> None:
        """Drop the oldest files until the rest is within the bound."""

        def old() -> list[tuple[int, str, int]]:
            return [value for value in self._values if value[0] < self._call]

        def total() -> int:
            return sum(file[1] for file in self._files) + self._largest + sum(value[2] for value in old())

        while total() > self.keep and (self._files or old()):
            values = old()
            if values and (not self._files or values[0][0] <= self._files[0][2]):
                self._values.remove(values[0])
                gone = values[0][1]
            else:
                gone = path(self._folder, self._files.popleft()[0])
            with contextlib.suppress(OSError):
                os.remove(gone)

    def close(self) -> None:
        """Stop writing, and close the files."""
        with self.lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            with contextlib.suppress(OSError):
                os.remove(self._reserved)

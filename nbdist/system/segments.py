"""Shared memory without a name.

A segment is a memfd (without memfd, an unlinked file), so it ends with its last descriptor and mapping, even if its
users are killed. Readers map it copy-on-write: writable, private, not copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from .copying import by_threads, pieces
from .free_memory import refused

_PIECE = 8 << 20  # bytes that one core compares as fast as several
#: Bytes that are reserved at once: a signal undoes a reservation that it finds half done.
_RESERVED = 16 << 20
_SHARED = "/dev/shm"


def unnamed_file(purpose: str) -> int:
    """Return the descriptor of a new file without a name, in memory if possible; tools show its `purpose`."""
    with contextlib.suppress(AttributeError, OSError):  # not on Linux; or a sandbox refuses it
        return os.memfd_create(purpose, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(dir=_SHARED if os.access(_SHARED, os.W_OK) else None) as file:
        return os.dup(file.fileno())


class Segment:
    """A piece of shared memory without a name."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._view: memoryview | None = None

    @staticmethod
    def create(size: int, what: str = "shared memory") -> Segment:
        """Make a segment, and reserve its memory: otherwise a write could raise SIGBUS.

        Raises `MemoryError`, with `what` as the name of the content, if the system refuses. In a full container the
        system kills a process instead: call `free_memory.check_fits` before.
        """
        fd = unnamed_file("nbdist")
        try:
            os.truncate(fd, size)
            _reserve(fd, size)
        except BaseException as exc:
            try:
                if isinstance(exc, OSError) and exc.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                    raise refused(size, what, exc.errno, fd) from exc
                raise
            finally:
                os.close(fd)
        return Segment(fd, size)

    def write(self, view: memoryview, position: int) -> None:
        # Not a memcpy into a mapping: pages need no zeroing first, and a full memory is an error, not a SIGBUS.
        while view.nbytes:
            done = os.pwrite(self.fd, view[: 1 << 30], position)
            view, position = view[done:], position + done

    def private(self) -> memoryview:
        """Return a new mapping with private writes. Raises `MemoryError` if no address space is left for it."""
        return memoryview(self._map(mmap.ACCESS_COPY))

    def shared(self) -> mmap.mmap:
        """Return a new mapping whose writes all processes see."""
        return self._map(mmap.ACCESS_WRITE)

    def _map(self, access: int) -> mmap.mmap:
        try:
            return mmap.mmap(self.fd, self.size, access=access)
        except OSError as exc:
            if exc.errno != errno.ENOMEM:
                raise
            raise refused(self.size, "shared memory", exc.errno) from exc

    def holds(self, view: memoryview, position: int) -> bool:
        """Return whether the bytes at `position` equal `view`."""
        if self._view is None:
            self._view = memoryview(self._map(mmap.ACCESS_READ))
        return same_bytes(self._view[position : position + view.nbytes], view)

    def duplicate(self) -> Segment:
        """Return another segment of the same memory, with its own descriptor."""
        return Segment(os.dup(self.fd), self.size)

    def close(self) -> None:
        """Close this process's descriptor; mappings stay."""
        fd, self.fd = self.fd, -1
        self._view = None
        if fd >= 0:
            os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Reserve the memory of a segment before it is written."""
    if hasattr(os, "posix_fallocate"):
        for start, length in pieces(size, _RESERVED):
            try:
                os.posix_fallocate(fd, start, length)
            except OSError as exc:
                if exc.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM):
                    return  # the file system cannot, or a sandbox refuses it
                raise


class BufferLocation(NamedTuple):
    """The location of a buffer: the number of its segment, its start and its size in bytes."""

    segment: int
    start: int
    size: int


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    memcmp: Any = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return cast("Callable[[int, int, int], int]", memcmp)


def _address(buffer: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Return whether two buffers hold the same bytes: with memcmp, on several cores for large ones."""
    if a.nbytes != b.nbytes:
        return False
    left, right = _address(a), _address(b)
    memcmp = _memcmp()

    def same(piece: tuple[int, int]) -> bool:
        start, size = piece
        return bool(memcmp(left + start, right + start, size) == 0)

    return all(by_threads(same, list(pieces(a.nbytes, _PIECE))))

"""Big buffers of a rank's answer, which the kernel reads from the rank's own memory. Both ends.

This takes one copy, by several cores; a shared segment takes one more, by one core. The system chooses the size of the
pages: huge pages are fewer, but if memory for them must first be found (compacted, or returned by a hypervisor), it
takes longer. Only Linux allows it, and not everywhere (Yama's ptrace_scope, a container's seccomp); elsewhere the
answer is sent in a segment like any other parcel.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..system.copying import by_threads, own_memory, pieces
from ..system.free_memory import check_fits

#: Whether a process can read another's memory here at all.
POSSIBLE = sys.platform == "linux"
#: Buffers that are fewer bytes together are not worth a question.
LEAST = 8 << 20

_PIECE = 32 << 20  # bytes that one core reads as fast as several


class RankBuffer(NamedTuple):
    """A buffer in a rank's memory: its address and size in bytes."""

    address: int
    size: int


def locate(views: Iterable[memoryview]) -> list[RankBuffer]:
    """Return, in the rank, the locations of these buffers. The buffers must not move until the kernel has answered."""
    import numpy as np

    arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
    return [RankBuffer(array.ctypes.data, array.nbytes) for array in arrays]


def copy(pid: int, buffers: Sequence[RankBuffer]) -> list[memoryview]:
    """Copy, in the kernel, a rank's buffers, each to new memory.

    Raises `OSError` if that is not allowed, or the rank has ended; `MemoryError` if the buffers do not fit.
    """
    check_fits(sum(buffer.size for buffer in buffers), "the value that the function returned")
    copies = [own_memory(buffer.size) for buffer in buffers]
    work = [
        (_address(copy) + done, buffer.address + done, size)
        for copy, buffer in zip(copies, buffers, strict=True)
        for done, size in pieces(buffer.size, _PIECE)
    ]
    by_threads(lambda piece: _read(pid, *piece), work)
    return copies


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _read(pid: int, to: int, address: int, size: int) -> None:
    """Copy memory of another process to an address of this one."""
    process_vm_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    process_vm_readv.restype = ctypes.c_ssize_t
    process_vm_readv.argtypes = (
        *(ctypes.c_int, ctypes.POINTER(_Iovec), ctypes.c_ulong),
        *(ctypes.POINTER(_Iovec), ctypes.c_ulong, ctypes.c_ulong),
    )
    while size:
        count = process_vm_readv(pid, _Iovec(to, size), 1, _Iovec(address, size), 1, 0)
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        to, address, size = to + count, address + count, size - count

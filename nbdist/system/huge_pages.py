"""A process's memory in Linux's huge pages, of 2 MiB instead of 4 KiB."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

_COLLAPSE = 25
"""MADV_COLLAPSE, which Python has no name for."""


def gather(start: int, size: int) -> None:
    """Move memory of this process to huge pages, except for parts at both ends that fill no whole page. Values and
    addresses do not change.

    Before Linux 6.1 this does nothing.

    Args:
        start: The address of the first byte.
        size: The size in bytes.
    """
    if sys.platform != "linux":
        return
    within = start % mmap.PAGESIZE
    _madvise()(start - within, size + within, _COLLAPSE)


@functools.cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise

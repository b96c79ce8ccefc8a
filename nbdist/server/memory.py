"""The server's memory, arranged so that forks of it are cheap: huge pages, and little garbage collection."""

from __future__ import annotations

import ctypes
import gc
import sys

_HUGE, _MADV_COLLAPSE = 2 << 20, 25


def huge_pages() -> list[int]:
    """The addresses at which this process's memory could lie in huge pages."""
    if sys.platform != "linux":
        return []
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    spans = [
        [int(address, 16) for address in addresses.split("-")]
        for addresses, access, _, _, inode, *_ in maps
        if access == "rw-p" and inode == "0"
    ]
    return [page for start, end in spans for page in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE)]


def gather(page: int) -> None:
    """Gather a piece of this process's memory in a huge page.

    A fork copies the page table, and a rank's exit takes it down: with huge pages both take half the time. What a rank
    writes to is still copied by small pages.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(page, _HUGE, _MADV_COLLAPSE)  # before Linux 6.1 this is an error, and nothing is lost


def pretend_objects(count: int) -> None:
    """Let Python believe that it has so many objects in which it found no garbage.

    It looks through all when those that are new are a quarter of these. Frozen ones do not count, so in a rank it would
    look again and again while `fn` makes its own: 0.16 s of a training of 6 s (a fresh interpreter: 0.03 s).
    To collect after the imports would do too, but leaves holes all over the memory: what a rank puts there copies 5 MB
    of pages.
    """
    objects: list[list[None]] = [[] for _ in range(count)]
    gc.collect()
    del objects

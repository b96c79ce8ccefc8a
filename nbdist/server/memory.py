"""The server's memory, arranged so that forks of it are cheap: huge pages, and little garbage collection."""

from __future__ import annotations

import gc
import sys

HUGE = 2 << 20
"""Bytes of a huge page."""


def huge_pages() -> list[int]:
    """The addresses at which this process's memory could lie in huge pages.

    A fork copies the page table, and a rank's exit takes it down: with huge pages both take half the time. What a rank
    writes to is still copied by small pages.
    """
    if sys.platform != "linux":
        return []
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    spans = [
        [int(address, 16) for address in addresses.split("-")]
        for addresses, access, _, _, inode, *_ in maps
        if access == "rw-p" and inode == "0"
    ]
    return [page for start, end in spans for page in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE)]


def pretend_objects(count: int) -> None:
    """Make Python count `count` more objects in which it found no garbage.

    It searches all objects when the new ones are a quarter of the old ones. Frozen ones do not count, so in a rank it
    would look again and again while `fn` makes its own: 0.16 s of a training of 6 s (a fresh interpreter: 0.03 s).
    To collect after the imports would do too, but leaves holes all over the memory: what a rank puts there copies 5 MB
    of pages.
    """
    objects: list[list[None]] = [[] for _ in range(count)]
    gc.collect()
    del objects

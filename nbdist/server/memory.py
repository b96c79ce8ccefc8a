"""Preparation of the server's memory for cheap forks: huge pages, and fewer garbage collections."""

from __future__ import annotations

import gc
import sys

HUGE = 2 << 20
"""The size of a huge page, in bytes."""


def huge_pages() -> list[int]:
    """Return the addresses at which this process's memory can use huge pages.

    A fork copies the page table, and the exit of a rank frees it: with huge pages both take half the time. Memory that
    a rank writes to is still copied by small pages.
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


def inflate_object_count(count: int) -> None:
    """Raise the number of old objects that Python's garbage collector counts by `count`.

    A full collection starts when the new objects are a quarter of the old ones, and frozen objects do not count as old.
    Without this, a rank would collect again and again while `fn` makes its first objects: 0.16 s of a training of 6 s
    (a fresh interpreter: 0.03 s). A collection after the imports has the same effect, but leaves holes in the memory:
    new objects of a rank in these holes copy 5 MB of pages.
    """
    objects: list[list[None]] = [[] for _ in range(count)]
    gc.collect()
    del objects

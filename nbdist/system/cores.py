"""The cores that a rank may use: its own share, on one NUMA node if the shares allow it."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux, or a sandbox refuses it
        return list(range(os.cpu_count() or 1))


def load_per_core() -> float:
    """Return the number of threads that run or want to run, for each core of the machine, as a mean over the last
    minute; 0.0 if the system does not report it.
    """
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


@functools.cache
def numa_nodes() -> list[list[int]]:
    """Return the cores of each NUMA node; an empty list if the system does not report them."""
    lists = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return [parse_cores(path.read_text()) for path in lists]


def parse_cores(text: str) -> list[int]:
    """Parse a list of cores in Linux's format: `0-3,8,10-11`."""
    cores: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def shares(cores: Sequence[int], nodes: Sequence[Sequence[int]], nranks: int) -> list[list[int]]:
    """Return the cores for each of `nranks` ranks.

    If there are enough cores, each core belongs to one rank, the shares differ by at most one core, and the ranks fill
    one node after the other, so that few shares are on two nodes. With fewer cores than ranks, ranks take turns on
    them. The memory of a rank is then on its node, too: Linux allocates memory on the node of the core that first uses
    it.
    """
    node_of = {core: number for number, node in enumerate(nodes) for core in node}
    ordered = sorted(cores, key=lambda core: (node_of.get(core, 0), core))
    if len(ordered) < nranks:
        return [[ordered[rank % len(ordered)]] for rank in range(nranks)]
    bounds = [len(ordered) * rank // nranks for rank in range(nranks + 1)]
    return [ordered[first:last] for first, last in itertools.pairwise(bounds)]


def near(own: Sequence[Sequence[int]], wanted: Sequence[Collection[int]]) -> list[Sequence[int]]:
    """Exchange the shares so that, as far as possible, ranks get shares with the cores that they want.

    Args:
        own: The share of each rank.
        wanted: The cores near each rank's GPU; empty if they are not known.
    """
    left = list(own)
    chosen: dict[int, Sequence[int]] = {}
    for rank, cores in enumerate(wanted):
        best = max(left, key=lambda share: len(set(share) & set(cores)))
        if set(best) & set(cores):
            left.remove(best)
            chosen[rank] = best
    return [chosen[rank] if rank in chosen else left.pop(0) for rank in range(len(own))]

"""Killing the remaining processes of Ray nodes on this machine.

Ray's agents and workers notice late that their node has ended, on a busy machine after more than a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the living processes with these ids, and all that they have started."""
    import psutil

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes that still live, and wait for their end."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=3)

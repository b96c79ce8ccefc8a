"""Ending all processes of Ray nodes on this machine.

Ray's agents and workers notice late that their node has ended, on a busy machine after more than a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

#: Seconds that a node's own processes get to end, before they are killed.
GRACE = 3


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the living processes with these ids, and all that they have started."""
    import psutil

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def end(processes: Iterable[psutil.Process]) -> None:
    """End processes of Ray: nodes are asked to, and all that is left after `GRACE` seconds is killed."""
    import psutil

    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(process)
            if process.name() in ("raylet", "gcs_server"):
                process.terminate()
    _, left = psutil.wait_procs(left, timeout=GRACE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=GRACE)

"""The limits of open files and of processes: many ranks need more than a shell or a container allows by default."""

from __future__ import annotations

import contextlib
import os
import re
import resource

#: Descriptors left for everything else.
_SPARE = 64
#: Limits above this are of no use, and slow down programs that close every descriptor there may be.
_ENOUGH = 1 << 20
#: How Python, C++, OpenMP and OpenBLAS say that the system gives a process no further thread.
_NO_THREAD = re.compile(
    r"can't start new thread|Thread creation failed|pthread_create failed"
    r"|(?:RuntimeError|system_error)[^\n]*\n?[^\n]*Resource temporarily unavailable"
)


def allow_more_above(fd: int) -> None:
    """Raise the soft limit if the number of a new descriptor comes close to it, because other threads may open more."""
    if fd + _SPARE > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        allow_open_files(_SPARE)


def allow_open_files(count: int) -> int:
    """Allow `count` more descriptors in this process: the soft limit is raised up to the hard one if necessary.

    Returns the number of descriptors that are available now.
    """
    used = len(os.listdir("/dev/fd"))
    soft, hard = (_ENOUGH if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = used + count + _SPARE
    if soft < wanted:
        raised = min(hard, max(wanted, _ENOUGH))
        with contextlib.suppress(ValueError, OSError):  # macOS has a third limit, which it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            soft = raised
    return soft - used - _SPARE


def lack_of_threads(words: str) -> str:
    """Return a text for a process that could not start a thread, judging by the text of its error; empty if the error
    has another cause.

    Args:
        words: The error, or the last output of the process.
    """
    if not _NO_THREAD.search(words):
        return ""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    of_user = "" if most == resource.RLIM_INFINITY else f"{most:,} of this user (`ulimit -u`), or "
    return (
        f"could not start a thread: the limit of processes and threads is reached, {of_user}that of the container "
        f"(`pids.max` of its control group). Raise it, end other processes, or use fewer ranks"
    )

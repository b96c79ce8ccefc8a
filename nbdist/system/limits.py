"""The limit of open files: many ranks need more of them than a shell allows by default."""

from __future__ import annotations

import contextlib
import os
import resource

#: Descriptors left for everything else.
_SPARE = 64
#: Limits above this are of no use, and slow down programs that close every descriptor there may be.
_ENOUGH = 1 << 20


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

"""Imports in the server that hang or crash: ranks can still end, and sessions still get ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..deaths import describe_status
from ..rank.main import PDEATHSIG, prctl
from ..wire.forking import BREAK_OFF

_LOOK = 1.0  # seconds from one look at the kernel to the next


class BrokenOff(BaseException):
    """The kernel has stopped waiting for the import."""


class Crash(NamedTuple):
    """An import has ended the process."""

    module: str
    why: str


@contextlib.contextmanager
def watched(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` every second during an import, and let the kernel interrupt the import.

    Both are possible between two bytecodes of Python, and in system calls, but not in compiled code that never returns.
    """

    def break_off(signum: int, frame: object) -> None:
        raise BrokenOff

    signal.signal(signal.SIGALRM, lambda signum, frame: look())
    signal.signal(BREAK_OFF, break_off)
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        ignore_break_off()


def ignore_break_off() -> None:
    """Ignore a request to interrupt an import that arrived after the import."""
    signal.signal(BREAK_OFF, lambda signum, frame: None)


def find_crash(modules: Sequence[str], path: Sequence[str]) -> Crash | None:
    """Import modules in a fork of this process, and return the first module that ends the fork or whose import was
    interrupted."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _try(modules, path, writes)
    os.close(writes)
    with open(reads) as progress:
        try:
            why = describe_status(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        except BrokenOff:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            why = "takes long"
        begun = progress.read().splitlines()
    return None if begun[-1:] == [""] else Crash(begun[-1] if begun else modules[0], why)


def _try(modules: Sequence[str], path: Sequence[str], progress: int) -> None:
    """Write each module's name before its import, and an empty line at the end. This runs in the fork."""
    try:
        prctl(PDEATHSIG, signal.SIGKILL)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)  # the server reports what goes wrong
        sys.path[:] = path
        for name in modules:
            os.write(progress, f"{name}\n".encode())
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        os.write(progress, b"\n")
    finally:
        os._exit(0)

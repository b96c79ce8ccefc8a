"""Requests for ranks to the fork server, and its reports."""

from __future__ import annotations

import signal
import struct
from typing import NamedTuple

#: What the server says of a rank to the kernel: rank, pid, wait status (or `STARTED`). Without a pid, it could not be
#: started, and the number of the error is in the place of the status.
REPORT = struct.Struct("<iii")
STARTED = -(2**31)

#: Makes a rank write its stack while it is in C code that keeps the GIL. Not one that people use for themselves.
STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

#: Makes the server break off what it imports.
BREAK_OFF = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


class RankDescriptors(NamedTuple):
    """The rank's ends of its connections to the kernel."""

    channel: int
    stdout: int
    stderr: int
    stacks: int
    """The socket for requests for the rank's stack."""

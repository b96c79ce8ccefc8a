"""What can go wrong in a call, as the user meets it.

Exception
└── NbdistError          base of everything nbdist raises on its own account
    ├── CaptureError     something that the call needs cannot be pickled
    ├── RankDied         a rank's process ended without an answer
    └── RankTimeout      a call took longer than its `timeout`

An exception raised by the user's function in a rank is none of these: it arrives with its own type, and a
`RemoteTraceback` (the rank's traceback as text) as its cause.
"""

from __future__ import annotations

import builtins
import signal
import traceback


class NbdistError(Exception):
    """Base class of the errors nbdist raises on its own account."""


class CaptureError(NbdistError):
    """Something that a call needs cannot be pickled; the message names the variable and the path inside it."""


class RankDied(NbdistError):
    """A rank's process ended before it answered.

    Attributes: `rank`, `pid`, `status` (exit code, or minus the number of the signal that killed it).
    """

    def __init__(self, rank: int, pid: int | None, status: int | None, output: str = "") -> None:
        self.rank, self.pid, self.status, self.output = rank, pid, status, output
        message = f"rank {rank} (pid {pid}) {describe_status(status)}"
        if output:
            message += f"\nLast output of rank {rank}:\n{output.rstrip()}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankDied], tuple[int, int | None, int | None, str]]:
        return RankDied, (self.rank, self.pid, self.status, self.output)


class RankTimeout(NbdistError, TimeoutError):
    """A call took longer than its timeout; its ranks were ended."""


class RemoteTraceback(Exception):
    """The traceback of an exception as it was in the rank. Only ever seen as the cause of that exception."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank, self.text = rank, text
        super().__init__(rank, text)

    def __str__(self) -> str:
        return f"on rank {self.rank}\n\n{self.text.rstrip()}"


def describe_status(status: int | None) -> str:
    """A wait status in words: exit code, or the signal by name and its likely reason."""
    if status is None:
        return "disappeared: its exit status could not be read (was the fork server killed?)"
    if status >= 0:
        return f"left with exit code {status} before its function returned"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hints = {
        "SIGKILL": ": out of memory? Nothing in nbdist sent this signal",
        "SIGBUS": ": /dev/shm full?",
        "SIGSEGV": ": a crash in compiled code",
    }
    return f"was killed by {name}{hints.get(name, '')}"


def remote_text(exc: BaseException, *, skip_file: str) -> str:
    """The traceback of `exc` as text, without the leading frames that belong to `skip_file` (the rank's loop)."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == skip_file and tb.tb_next is not None:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(exc), exc, tb))


def nearest_builtin(exc: BaseException) -> BaseException:
    """A stand-in for an exception that cannot be pickled: its nearest built-in base, with its name and text."""
    text = f"{type(exc).__qualname__}: {exc}"
    for base in type(exc).__mro__:
        if getattr(builtins, base.__name__, None) is base:
            try:
                return base(text)  # type: ignore[no-any-return]
            except TypeError:  # such as UnicodeDecodeError, which takes five arguments
                continue
    return RuntimeError(text)

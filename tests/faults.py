"""The fault table: each way a call can fail, and what the user must see then.

`code` runs in a notebook after `PRELUDE`; what is longer than a line is a cell of cells/faults.py. In it, `failing()`
marks the moment of the failure, from which benchmarks/kernel/faults.py counts the time to the exception in the cell.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import cells

CELLS = cells("cells/faults.py")
PRELUDE = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n" + CELLS["prelude"]


@dataclass(frozen=True)
class Fault:
    """A row: the cell, the exception type and a part of the message or traceback that the user must see."""

    name: str
    code: str
    error: str | None
    shows: tuple[str, ...] = ()
    waits: float = 0.0
    """Seconds that this failure needs before its exception can be raised; for the benchmark."""
    only_fresh: bool = False
    """True if only ranks that are being started can fail in this way."""
    ruins: bool = False
    """True if a rank still lives after the failure, but cannot take another call."""

    @property
    def live(self) -> str | None:
        """The exception in a session whose ranks run already."""
        return None if self.only_fresh else self.error

    @property
    def survives(self) -> bool:
        """Return whether the ranks of a session are the same afterwards."""
        return self.error not in ("RankDied", None) and not self.ruins and "Session(" not in self.code


def _dies(name: str, action: str, *shows: str) -> Fault:
    return Fault(name, f"in_ddp(2, only(1, lambda: {action}, sums))", "RankDied", ("rank 1 (pid", *shows))


def _of_cell(name: str, error: str | None, shows: tuple[str, ...] = (), **more: Any) -> Fault:
    """A row whose code is the cell of its name."""
    return Fault(name, CELLS[name], error, shows, **more)


FAULTS = [
    Fault(
        "raise while others compute",
        "in_ddp(2, only(1, lambda: throw(ValueError('boom')), compute))",
        "ValueError",
        ("boom", "rank 1 (pid", "Cell In["),
    ),
    Fault(
        "raise while others wait",
        "in_ddp(2, only(1, lambda: throw(KeyError('boom')), sums))",
        "KeyError",
        ("boom",),
    ),
    Fault(
        "raise while others have returned",
        "in_ddp(2, only(0, lambda: throw(TypeError('boom'))))",
        "TypeError",
        ("boom",),
    ),
    _of_cell(
        "raise in both ranks",
        "ValueError",
        ("boom", "also failed: rank"),
        ruins=True,
    ),
    _of_cell(
        "raise in the import block",
        "ZeroDivisionError",
        ("import thorny", "thorny.py"),
    ),
    _of_cell(
        "import of a missing module",
        "ModuleNotFoundError",
        ("no_such",),
    ),
    Fault(
        "raise while an argument is read",
        "in_ddp(2, lambda thorn: 1, Thorn())",
        "CaptureError",
        ("cannot be read", "__setstate__"),
    ),
    Fault(
        "sys.exit(0)",
        "in_ddp(2, only(1, lambda: sys.exit(0), sums))",
        "SystemExit",
    ),
    Fault(
        "sys.exit(7)",
        "in_ddp(2, only(0, lambda: sys.exit(7), sums))",
        "SystemExit",
        ("7",),
    ),
    _dies("os._exit(0)", "os._exit(0)", "exit code 0"),
    _dies("os._exit(7)", "os._exit(7)", "exit code 7"),
    _dies("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", "out of memory?"),
    _dies("SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"),
    _dies("SIGSEGV", "ctypes.string_at(0)", "SIGSEGV", "Fatal Python error", "string_at"),
    _dies("SIGBUS", "os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS", "/dev/shm full?"),
    _dies("last words", "(print('my last words'), os.kill(os.getpid(), signal.SIGKILL))", "my last words"),
    _of_cell(
        "the fork server is killed",
        "RankDied",
        ("fork server",),
    ),
    Fault(
        "the value cannot be pickled",
        "in_ddp(2, only(0, lambda: {'model': [1, (i for i in ())]}))",
        "CaptureError",
        ("['model'][1]", "generator"),
    ),
    Fault(
        "the exception cannot be pickled",
        "in_ddp(2, only(1, lambda: throw(Unpicklable('boom'))))",
        "LookupError",
        ("Unpicklable: boom",),
    ),
    _of_cell(
        "the exception's class is the notebook's",
        "OwnError",
        ("boom",),
    ),
    _of_cell(
        "the exception's __str__ and __repr__ raise",
        "LookupError",
        ("rank 1 (pid", "in throw"),
    ),
    _of_cell(
        "the exceptions of both ranks have no text",
        "LookupError",
        ("also failed: rank",),
        ruins=True,
    ),
    Fault(
        "the exception cannot be shown",
        "in_ddp(2, only(1, lambda: throw(Noted('boom'))))",
        "Noted",
        ("rank 1 (pid", "in throw"),
    ),
    Fault(
        "the exception exits when it is looked at",
        "in_ddp(2, only(1, lambda: throw(Exits('boom'))))",
        "ValueError",
        ("Exits", "rank 1 (pid"),
    ),
    _of_cell(
        "standard output is closed",
        None,
        ruins=True,
    ),
    _of_cell(
        "an exception with a cause",
        "RuntimeError",
        ("outer", "ZeroDivisionError"),
    ),
    _of_cell(
        "500 MB returned",
        None,
        waits=5,
    ),
    _of_cell(
        "a child process forked by a rank",
        "ValueError",
        ("parent",),
    ),
    _of_cell(
        "a forked child returns too",
        None,
    ),
    _of_cell(
        "a child in a session of its own",
        "RankDied",
    ),
    Fault(
        "a rank with data loader workers dies",
        "in_ddp(2, loads, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))",
        "RankDied",
        ("SIGKILL",),
        waits=1,
    ),
    _of_cell(
        "a signal handler prints while the rank prints",
        None,
    ),
    _of_cell(
        "the notebook is out of descriptors",
        "NbdistError",
        ("open files in this process", "0 ranks fit"),
        only_fresh=True,
    ),
    _of_cell(
        "a rank is out of descriptors",
        "OSError",
        ("Too many open files",),
    ),
    _of_cell(
        "no descriptor for the value",
        "OSError",
        ("Too many open files",),
        ruins=True,
    ),
    _of_cell(
        "recursion",
        "RecursionError",
        ("maximum recursion depth",),
    ),
    _of_cell(
        "out of memory under a limit",
        "MemoryError",
        ruins=True,
    ),
    _of_cell(
        "others ignore SIGTERM and SIGINT",
        "ValueError",
        ("boom",),
        ruins=True,
    ),
    _of_cell(
        "timeout in a collective",
        "RankTimeout",
        ("rank 0 waits in all_reduce at Cell In[", "rank 1 has returned", "not done after 1000 s"),
        waits=1,
    ),
    _of_cell(
        "a collective's own timeout",
        "RuntimeError",
        ("Timed out", "all_reduce"),
        waits=1,
    ),
    Fault(
        "input()",
        "in_ddp(2, only(1, lambda: input('name?')))",
        "NbdistError",
        ("in_ddp(0,",),
    ),
    Fault(
        "breakpoint()",
        "in_ddp(2, only(1, breakpoint))",
        "NbdistError",
        ("in_ddp(0,",),
    ),
    _of_cell(
        "the value cannot be rebuilt",
        "CaptureError",
        ("cannot be rebuilt",),
    ),
]

if sys.version_info >= (3, 11):
    FAULTS.append(
        Fault(
            "an exception group",  # no cell: ruff reads these as Python 3.10
            """
error = ExceptionGroup('many', [KeyError('a'), OwnError('b', 2)])
try:
    in_ddp(2, only(1, lambda: throw(error)))
except* OwnError as group:
    assert group.exceptions[0].code == 2
except* KeyError:
    pass
raise LookupError('seen')
""",
            "LookupError",  # IPython shows groups as plain text, and not as an error
            ("seen",),
        )
    )


@dataclass(frozen=True)
class Phase:
    """A phase of ranks when the notebook interrupts or loses them; `began` exists as a file from then on."""

    name: str
    code: str


PHASES = [
    Phase(name, CELLS[name])
    for name in ("importing", "in Python code", "asleep", "in a collective", "returning the value")
]

#: The GIL held in C code: no Python code of the rank, no handler of a signal can run.
GIL_HELD = Phase("in C code that holds the GIL", CELLS["in C code that holds the GIL"])
WITH_CHILDREN = Phase("with children of their own", CELLS["with children of their own"])

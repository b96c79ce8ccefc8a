"""The fault table: each way a call can fail, and what the user must see then.

`code` runs in a notebook after `PRELUDE`. In it, `failing()` marks the moment of the failure, from which
benchmarks/kernel/faults.py counts the time to the exception in the cell.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PRELUDE = f"import sys; sys.path.append({str(Path(__file__).parent)!r})"
PRELUDE += """
import ctypes, datetime, os, resource, signal, subprocess, sys, time
import torch, torch.distributed as dist
from clocks import CallClock
from nbdist import NbdistError, RankDied, RankTimeout, CaptureError, Session, in_ddp

def failing():
    with open("failed_at", "w") as file:
        file.write(str(time.time()))

def sums():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

def only(rank, action, then=lambda: None):
    def run():
        if dist.get_rank() == rank:
            failing()
            return action()
        return then()
    return run

def throw(error):
    raise error

def compute():
    x = 0
    while True:
        x += 1

torch.ones(1 << 20).sum()  # starts torch's threads

class OwnError(ValueError):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code

class Unpicklable(LookupError):
    def __init__(self, text):
        super().__init__(text)
        self.generator = (i for i in ())

class Mute(ValueError):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__

class Exits(ValueError):
    def __str__(self):
        sys.exit("str")
    def __reduce__(self):
        sys.exit("reduce")

class Noted(ValueError):
    @property
    def __notes__(self):
        raise RuntimeError("no notes")

class Thorn:
    def __setstate__(self, state):
        failing()
        raise OSError("cannot be read")
    def __getstate__(self):
        return {"a": 1}

def loads(workers, then):
    from torch.utils.data import DataLoader
    batches = iter(DataLoader(list(range(1000)), batch_size=2, num_workers=workers))
    next(batches)
    failing()
    return then()
"""


@dataclass(frozen=True)
class Fault:
    """One row: the cell, the exception type and a part of the message or traceback that the user must see."""

    name: str
    code: str
    error: str | None
    shows: tuple[str, ...] = ()
    waits: float = 0.0
    """Seconds that this failure takes by its nature, before its exception can be there; for the benchmark."""
    only_fresh: bool = False
    """Whether this can only befall ranks that are being started: running ones do not notice."""
    ruins: bool = False
    """Whether it leaves a rank in a state in which it can take no more calls, although it lives."""

    @property
    def live(self) -> str | None:
        """The exception in a session whose ranks run already."""
        return None if self.only_fresh else self.error

    @property
    def survives(self) -> bool:
        """Whether the ranks of a session are the same afterwards."""
        return self.error not in ("RankDied", None) and not self.ruins and "Session(" not in self.code


def _dies(name: str, action: str, *shows: str) -> Fault:
    return Fault(name, f"in_ddp(2, only(1, lambda: {action}, sums))", "RankDied", ("rank 1 (pid", *shows))


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
    Fault(
        "raise in both ranks",
        """
def both():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first to fail must not keep the other from it
    dist.barrier()
    failing()
    raise ValueError(f'boom {dist.get_rank()}')
in_ddp(2, both)
""",
        "ValueError",
        ("boom", "also failed: rank"),
        ruins=True,
    ),
    Fault(
        "raise in the import block",
        """
open('thorny.py', 'w').write('1 / 0')
failing()
in_ddp(2, sums, imports='import thorny')
""",
        "ZeroDivisionError",
        ("import thorny", "thorny.py"),
    ),
    Fault(
        "import of a missing module",
        """
failing()
in_ddp(2, sums, imports='import no_such')
""",
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
    Fault(
        "the fork server is killed",
        """
def kills_server():
    subprocess.Popen(['sleep', '1000'])
    failing()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
in_ddp(2, only(0, kills_server, sums))
""",
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
    Fault(
        "the exception's class is the notebook's",
        """
try:
    in_ddp(2, only(1, lambda: throw(OwnError('boom', 5))))
except OwnError as error:
    assert error.code == 5 and 'rank 1' in str(error.__cause__)
    raise
""",
        "OwnError",
        ("boom",),
    ),
    Fault(
        "the exception's __str__ and __repr__ raise",
        """
try:
    in_ddp(2, only(1, lambda: throw(Mute('boom'))))
except Mute as error:  # which the notebook itself cannot show
    raise LookupError('seen') from error.__cause__
""",
        "LookupError",
        ("rank 1 (pid", "in throw"),
    ),
    Fault(
        "the exceptions of both ranks have no text",
        """
def both():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first to fail must not keep the other from it
    dist.barrier()
    failing()
    raise Mute(dist.get_rank())
try:
    in_ddp(2, both)
except Mute as error:
    raise LookupError('seen') from error.__cause__
""",
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
    Fault(
        "standard output is closed",
        """
def closes():
    sys.stdout.close()
    sys.stderr = None
assert in_ddp(2, closes) is None
""",
        None,
        ruins=True,
    ),
    Fault(
        "an exception with a cause",
        """
def chain():
    try:
        1 / 0
    except ZeroDivisionError as e:
        failing()
        raise RuntimeError('outer') from e
in_ddp(2, chain)
""",
        "RuntimeError",
        ("outer", "ZeroDivisionError"),
    ),
    Fault(
        "500 MB returned",
        """
value = in_ddp(2, only(0, lambda: torch.ones(125_000_000)))
assert value.sum() == 125_000_000
del value
""",
        None,
        waits=5,
    ),
    Fault(
        "a child process forked by a rank",
        """
def forks():
    if os.fork() == 0:
        time.sleep(1000)
    failing()
    raise ValueError('parent')
in_ddp(2, forks)
""",
        "ValueError",
        ("parent",),
    ),
    Fault(
        "a forked child returns too",
        """
def forks():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid > 0
assert in_ddp(2, forks) is True
""",
        None,
    ),
    Fault(
        "a child in a session of its own",
        """
def detaches():
    subprocess.Popen(['sleep', '1000'], start_new_session=True)
    failing()
    os._exit(1)
in_ddp(2, detaches)
""",
        "RankDied",
    ),
    Fault(
        "a rank with data loader workers dies",
        "in_ddp(2, loads, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))",
        "RankDied",
        ("SIGKILL",),
        waits=1,
    ),
    Fault(
        "a signal handler prints while the rank prints",
        """
def handles():
    ticks = []
    def tick(*_):
        ticks.append(1)
        print('tick', flush=True)
        print('tock' * 2000)
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
    signal.signal(signal.SIGALRM, tick)
    tick()
    while len(ticks) < 60:
        print('line', flush=True)
        print('line' * 2000)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
in_ddp(2, only(1, handles))  # rank 0's output would all go to the cell
""",
        None,
    ),
    Fault(
        "the notebook is out of descriptors",
        """
import threading
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
raise_limit = resource.setrlimit
raise_limit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 5, hard))
def not_allowed(*args):
    raise ValueError("not allowed to raise maximum limit")
resource.setrlimit = not_allowed
failing()
try:
    in_ddp(2, sums)
finally:
    resource.setrlimit = raise_limit
    raise_limit(resource.RLIMIT_NOFILE, (soft, hard))
""",
        "NbdistError",
        ("open files in this process", "0 ranks fit"),
        only_fresh=True,
    ),
    Fault(
        "a rank is out of descriptors",
        """
def exhausts():
    failing()
    files = []
    while True:
        files.append(open('/dev/null'))
in_ddp(2, exhausts)
""",
        "OSError",
        ("Too many open files",),
    ),
    Fault(
        "no descriptor for the value",
        """
def exhausts():
    files = []
    try:
        while True:
            files.append(os.dup(0))
    except OSError:
        failing()
        return torch.ones(1_000_000), None
    finally:
        globals()['keep'] = files
in_ddp(2, exhausts)
""",
        "OSError",
        ("Too many open files",),
        ruins=True,
    ),
    Fault(
        "recursion",
        """
def deep(n):
    return deep(n + 1)
def run():
    failing()
    return deep(0)
in_ddp(2, run)
""",
        "RecursionError",
        ("maximum recursion depth",),
    ),
    Fault(
        "out of memory under a limit",
        """
def greedy():
    import psutil
    now = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20), -1))
    failing()
    return bytearray(1 << 30)
in_ddp(2, greedy)
""",
        "MemoryError",
        ruins=True,
    ),
    Fault(
        "others ignore SIGTERM and SIGINT",
        """
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(1000)
in_ddp(2, only(1, lambda: (time.sleep(0.2), failing(), throw(ValueError('boom'))), deaf))
""",
        "ValueError",
        ("boom",),
        ruins=True,
    ),
    Fault(
        "timeout in a collective",
        """
with Session(2, timeout=1000) as session:
    with CallClock(lambda: "idle" in str(session.status()) and "rank 0 waits in" in session.stacks()):
        session.run(only(1, lambda: None, sums))
""",
        "RankTimeout",
        ("rank 0 waits in all_reduce at Cell In[", "rank 1 has returned", "not done after 1000 s"),
        waits=1,
    ),
    Fault(
        "a collective's own timeout",
        """
def late():  # a session's `backend={'timeout': 1}` would be that of ranks which are only meeting, too
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
    if dist.get_rank() == 1:
        failing()
        time.sleep(1000)
    sums()
with Session(2) as session:
    session.run(late)
""",
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
    Fault(
        "the value cannot be rebuilt",
        """
class Fragile:
    def __reduce__(self):
        return (lambda: 1 // (os.getpid() == int(os.environ['MASTER_PORT'])), ())
in_ddp(2, only(0, Fragile))
""",
        "CaptureError",
        ("cannot be rebuilt",),
    ),
]

if sys.version_info >= (3, 11):
    FAULTS.append(
        Fault(
            "an exception group",
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
    """Where ranks can be when the notebook interrupts or loses them; `began` exists as a file from then on."""

    name: str
    code: str


_BEGIN = """
def begin():
    open("began", "w").close()
"""

PHASES = [
    Phase(
        "importing",
        """
open('slow.py', 'w').write("open('began', 'w').close()\\nimport time; time.sleep(1000)")
in_ddp(2, sums, imports='import slow')
""",
    ),
    Phase(
        "in Python code",
        _BEGIN
        + """
def run():
    begin()
    compute()
in_ddp(2, run)
""",
    ),
    Phase(
        "asleep",
        _BEGIN
        + """
def run():
    begin()
    time.sleep(1000)
in_ddp(2, run)
""",
    ),
    Phase(
        "in a collective",
        _BEGIN
        + """
def run():
    if dist.get_rank() == 1:
        begin()
        time.sleep(1000)
    sums()
in_ddp(2, run)
""",
    ),
    Phase(
        "returning the value",
        _BEGIN
        + """
class Slow:
    def __reduce__(self):
        begin()
        time.sleep(1000)
        return int, ()
in_ddp(2, lambda: Slow())
""",
    ),
]

#: The GIL held in C code: no Python code of the rank, no handler of a signal can run.
GIL_HELD = Phase(
    "in C code that holds the GIL",
    _BEGIN
    + """
def run():
    begin()
    ctypes.PyDLL(None).sleep(1000)
in_ddp(2, run)
""",
)
WITH_CHILDREN = Phase(
    "with children of their own",
    _BEGIN
    + """
def run():
    subprocess.Popen(['sleep', '1000'], start_new_session=True)
    loads(1, lambda: (begin(), time.sleep(1000)))
in_ddp(2, run)
""",
)

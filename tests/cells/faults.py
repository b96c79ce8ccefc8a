"""Cells of the fault table and of test_faults.py: the code of a row is the cell of its name."""

# %% prelude
import ctypes
import datetime
import os
import resource
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from clocks import CallClock, one_answered

from nbdist import Session, in_ddp


def failing():
    with open("failed_at", "w") as file:
        file.write(str(time.time()))


def begin():
    open("began", "w").close()


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
    def __notes__(self):  # type: ignore[override]
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


# %% a session that stays
import nbdist

staying = nbdist.Session(2)


def in_ddp(nranks, fn, *args, **kwargs):
    assert nranks == staying.nranks
    return staying.run(fn, *args, **kwargs)


# %% raise in both ranks
def both():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first to fail must not keep the other from it
    dist.barrier()
    failing()
    raise ValueError(f"boom {dist.get_rank()}")


in_ddp(2, both)

# %% raise in the import block
with open("thorny.py", "w") as file:
    file.write("1 / 0")
failing()
in_ddp(2, sums, imports="import thorny")


# %% import of a missing module
failing()
in_ddp(2, sums, imports="import no_such")


# %% the fork server is killed
def kills_server():
    subprocess.Popen(["sleep", "1000"])
    failing()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


in_ddp(2, only(0, kills_server, sums))

# %% the exception's class is the notebook's
try:
    in_ddp(2, only(1, lambda: throw(OwnError("boom", 5))))
except OwnError as error:
    assert error.code == 5 and "rank 1" in str(error.__cause__)
    raise

# %% the exception's __str__ and __repr__ raise
try:
    in_ddp(2, only(1, lambda: throw(Mute("boom"))))
except Mute as error:  # which the notebook itself cannot show
    raise LookupError("seen") from error.__cause__


# %% the exceptions of both ranks have no text
def both():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first to fail must not keep the other from it
    dist.barrier()
    failing()
    raise Mute(dist.get_rank())


try:
    in_ddp(2, both)
except Mute as error:
    raise LookupError("seen") from error.__cause__


# %% standard output is closed
def closes():
    sys.stdout.close()
    sys.stderr = None


assert in_ddp(2, closes) is None


# %% an exception with a cause
def chain():
    try:
        return 1 / 0
    except ZeroDivisionError as e:
        failing()
        raise RuntimeError("outer") from e


in_ddp(2, chain)

# %% 500 MB returned
value = in_ddp(2, only(0, lambda: torch.ones(125_000_000)))
assert value.sum() == 125_000_000
del value


# %% a child process forked by a rank
def forks():
    if os.fork() == 0:
        time.sleep(1000)
    failing()
    raise ValueError("parent")


in_ddp(2, forks)


# %% a forked child returns too
def forks():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid > 0


assert in_ddp(2, forks) is True


# %% a child in a session of its own
def detaches():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    failing()
    os._exit(1)


in_ddp(2, detaches)


# %% a signal handler prints while the rank prints
def handles():
    ticks = []

    def tick(*_):
        ticks.append(1)
        print("tick", flush=True)
        print("tock" * 2000)
        signal.setitimer(signal.ITIMER_REAL, 0.0005)

    signal.signal(signal.SIGALRM, tick)
    tick()
    while len(ticks) < 60:
        print("line", flush=True)
        print("line" * 2000)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


in_ddp(2, only(1, handles))  # rank 0's output would all go to the cell

# %% the notebook is out of descriptors
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
raise_limit = resource.setrlimit
raise_limit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))


def not_allowed(*args):
    raise ValueError("not allowed to raise maximum limit")


resource.setrlimit = not_allowed
failing()
try:
    in_ddp(2, sums)
finally:
    resource.setrlimit = raise_limit
    raise_limit(resource.RLIMIT_NOFILE, (soft, hard))


# %% a rank is out of descriptors
def exhausts():
    failing()
    files = []
    while True:
        files.append(open("/dev/null"))  # noqa: SIM115


in_ddp(2, exhausts)


# %% no descriptor for the value
def exhausts():
    files = []
    try:
        while True:
            files.append(os.dup(0))
    except OSError:
        failing()
        return torch.ones(1_000_000), None
    finally:
        globals()["keep"] = files


in_ddp(2, exhausts)


# %% recursion
def deep(n):
    return deep(n + 1)


def run():
    failing()
    return deep(0)


in_ddp(2, run)


# %% out of memory under a limit
def greedy():
    import psutil

    now = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20), -1))
    failing()
    return bytearray(1 << 30)


in_ddp(2, greedy)


# %% others ignore SIGTERM and SIGINT
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(1000)


in_ddp(2, only(1, lambda: (time.sleep(0.2), failing(), throw(ValueError("boom"))), deaf))


# %% timeout in a collective
there = CallClock(lambda: one_answered(session) and "rank 0 waits in" in session.stacks())
with Session(2, timeout=1000) as session, there:
    session.run(only(1, lambda: None, sums))


# %% a collective's own timeout
def late():  # `backend={'timeout': 1}` of a session would also limit the time in which the ranks meet
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
    if dist.get_rank() == 1:
        failing()
        time.sleep(1000)
    sums()


with Session(2) as session:
    session.run(late)


# %% the value cannot be rebuilt
class Fragile:
    def __reduce__(self):
        return (lambda: 1 // (os.getpid() == int(os.environ["MASTER_PORT"])), ())


in_ddp(2, only(0, Fragile))

# %% importing
with open("slow.py", "w") as file:
    file.write("open('began', 'w').close()\nimport time; time.sleep(1000)")
in_ddp(2, sums, imports="import slow")


# %% in Python code
def run():
    begin()
    compute()


in_ddp(2, run)


# %% asleep
def run():
    begin()
    time.sleep(1000)


in_ddp(2, run)


# %% in a collective
def run():
    if dist.get_rank() == 1:
        begin()
        time.sleep(1000)
    sums()


in_ddp(2, run)


# %% returning the value
class Slow:
    def __reduce__(self):
        begin()
        time.sleep(1000)
        return int, ()


in_ddp(2, lambda: Slow())


# %% in C code that holds the GIL
def run():
    begin()
    ctypes.PyDLL(None).sleep(1000)


in_ddp(2, run)


# %% with children of their own
def run():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    loads(1, lambda: (begin(), time.sleep(1000)))


in_ddp(2, run)


# %% an interrupt runs finally
def run():
    try:
        print("begin")
        time.sleep(1000)
    finally:
        print("cleaned up")


in_ddp(2, run)


# %% an interrupt in a finalizer
class Slow:
    def __del__(self):
        print("begin")
        time.sleep(1000)


def run():
    Slow()
    time.sleep(1000)


with Session(2) as session:
    pids = session.run_all(os.getpid)
    try:
        session.run(run)
    except KeyboardInterrupt:
        print("interrupted", session.run_all(os.getpid) == pids)

# %% a second interrupt does not wait
from nbdist.kernel.calls import ending


def stubborn():
    print("begin")
    while True:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            print("no")


ending.GRACE_AFTER_INTERRUPT, usual = 10_000.0, ending.GRACE_AFTER_INTERRUPT
try:
    in_ddp(2, stubborn)
finally:
    ending.GRACE_AFTER_INTERRUPT = usual


# %% shared memory is full
def big_batches():
    from torch.utils.data import DataLoader

    data = [torch.ones(1_000_000) for _ in range(4)]
    return sum(batch.sum() for batch in DataLoader(data, batch_size=2, num_workers=1))


in_ddp(2, big_batches)

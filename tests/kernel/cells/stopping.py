"""Cells of test_stopping.py, and the files that it writes."""


# %% a rank that does not leave
def stubborn():
    while True:
        try:
            open(f"begun{dist.get_rank()}", "w").close()
            time.sleep(1000)
        except KeyboardInterrupt:
            pass


in_ddp(2, lambda: stubborn() if dist.get_rank() else open("begun0", "w").close())

# %% ranks in C code
import itertools
import os


def holds_the_gil():
    begin = filter(None, map(os.mknod, [f"begun{dist.get_rank()}"]))
    sum(itertools.chain(begin, range(10**13)))


session.run(holds_the_gil)

# %% the notebook's main thread misses each press
import os
import signal

from nbdist import parallel_map


def sleep(_):
    open(f"begun{os.getpid()}", "w").close()
    time.sleep(1000)


_ = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


# %% ranks that import
import importlib
import os

session = Session(2)
pids = session.run_all(os.getpid)


def use():  # as a library does it that imports in the midst of its work
    importlib.import_module(f"{name}.part")
    return sys.modules[name].part.here


# %% slow to import
import os
import time

from . import part  # noqa: F401

open(f"begun{os.environ['RANK']}", "w").close()
while not os.path.exists("pressed"):
    time.sleep(0.01)
end = time.monotonic() + seconds
while time.monotonic() < end:
    time.sleep(0.01)


# %% an exit
def leaves():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()


in_ddp(2, leaves)

# %% a script
import traceback

from nbdist import Session, in_ddp


def fails():
    raise LookupError("boom")


if __name__ == "__main__":
    session = Session(1)
    for call in (
        lambda: in_ddp(1, fails),
        lambda: session.run(fails),
        lambda: session.submit(fails).result(),
        lambda: in_ddp(1, 5),
    ):
        try:
            call()
        except Exception as error:
            print([frame.name for frame in traceback.extract_tb(error.__traceback__)])

# %% test_theirs.py
from nbdist import in_ddp


def fails():
    raise LookupError("boom")


def test():
    in_ddp(1, fails)


# %% await and run
await asyncio.sleep(0)  # noqa: F704


def endless():
    open(f"begun{dist.get_rank()}", "w").close()
    time.sleep(1000)


in_ddp(2, endless)

# %% await and result
await asyncio.sleep(0)  # noqa: F704
Session(1).submit(lambda: (open("begun", "w").close(), time.sleep(1000))).result()

# %% await and map
from nbdist import parallel_map

await asyncio.sleep(0)  # noqa: F704


def endless_item(item):
    open(f"begun{item}", "w").close()
    time.sleep(1000)


parallel_map(endless_item, [0, 1], 2, progress=False)

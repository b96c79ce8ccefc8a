"""Cells and scripts of test_debugger.py."""

# %% first cell
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from nbdist import Session, in_ddp

session = Session(2)
session.run(int)


# %% a breakpoint in one rank
def touch_when_in(name, path):
    """Make a file once the main thread is in a function of this name."""

    main = threading.main_thread().ident

    def watch():
        while name not in [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])]:
            time.sleep(0.01)
        Path(path).touch()

    threading.Thread(target=watch, daemon=True).start()


def train():
    x = torch.full((1,), dist.get_rank() + 1.0)
    if dist.get_rank() == 0:
        touch_when_in("all_reduce", "rank 0 waits")
    else:
        while not Path("rank 0 waits").exists():
            time.sleep(0.01)
        breakpoint()
        x += 5
    dist.all_reduce(x)
    return x.item()


print("returned", session.run(train))


# %% breakpoints in both ranks
def stops():
    own = 10 + dist.get_rank()
    dist.barrier()
    breakpoint()
    return own


print(session.run_all(stops))


# %% stepping to the end
def f():
    breakpoint()
    return 5


print("returned", session.run(f, ranks=[0]))


# %% interact
def f(x):
    breakpoint()
    return x


print("returned", session.run(f, 6, ranks=[1]))

# %% a timeout that is over once there is a file
import os
from types import SimpleNamespace

from nbdist.kernel.calls import ending

short = Session(1, timeout=1000)
short.run(int)
ending.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 4000 * os.path.exists("later"))


# %% a breakpoint under a timeout
def f():
    breakpoint()
    return 5


print("returned", short.run(f))


# %% input
def asks():
    first = input("name? ")
    return first, sys.stdin.readline()


print(session.run(asks, ranks=[1]))


# %% a password
def asks():
    return getpass("key? "), read("name? ")


print(*map(len, session.run(asks, ranks=[0])))


# %% stop at a breakpoint
def f():
    breakpoint()
    return 5


session.run(f)

# %% input in a thread
from concurrent.futures import ThreadPoolExecutor

session.run(lambda: ThreadPoolExecutor().submit(input).result())


# %% debug in the frame of the rank
def train(x):
    return x / (x - x)


def caller(mine):
    session.run(train, mine)


caller(41)

# %% a call after a failure
try:
    session.run(int, "x")
except ValueError:
    session.run(int)


# %% debug in the cell that called
def caller(mine):
    in_ddp(1, lambda: 1 / 0)


caller(41)

# %% in a terminal
from nbdist import in_ddp


def f(x):
    breakpoint()
    return input("name? "), x


if __name__ == "__main__":
    print("returned", in_ddp(1, f, 6))

# %% the end of the input
from nbdist import in_ddp

if __name__ == "__main__":
    in_ddp(1, input)

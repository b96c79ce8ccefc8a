"""Scripts and modules of test_server.py."""

# %% an optimizer
import sys

import torch

from nbdist import in_ddp


def optimize():
    before = set(sys.modules)
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    return len(set(sys.modules) - before)


assert in_ddp(2, optimize) == 0

# %% a module that starts a thread
import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

# %% busy ranks
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from nbdist import Session


def fn(folder):
    rank = dist.get_rank()
    if rank == 3:
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(f"{folder}/{rank}", "w").close()
    if rank == 0:
        while True:
            pass
    if rank == 1:
        time.sleep(1000)
    if rank == 2:
        dist.all_reduce(torch.ones(1))
    time.sleep(1000)


session = Session(4)

# %% a process forked from the kernel
import os

from nbdist import in_ddp

print(in_ddp(1, lambda: "first"), flush=True)
pid = os.fork()
print(in_ddp(1, lambda: "child" if pid == 0 else "parent"), flush=True)
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    print(in_ddp(1, lambda: "last"), flush=True)

# %% ranks that wait
import signal

from nbdist import Session

session = Session(1)
session.run(int)
print("started", flush=True)
signal.pause()

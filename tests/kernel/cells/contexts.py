"""Cells and scripts of test_contexts.py."""

# %% temporary files
import multiprocessing.util
import os
import signal

import nbdist

ctx = nbdist.context("multiprocessing")
manager = ctx.Manager()
with ctx.Pool(1) as pool:
    folders = {multiprocessing.util.get_temp_dir(), pool.apply(lambda: multiprocessing.util.get_temp_dir())}
beside = [name for name in os.listdir(os.environ["TMPDIR"]) if not name.startswith("nbdist-")]
print(len(folders), beside == [os.path.basename(*folders)])
os.kill(manager._process.pid, signal.SIGKILL)

# %% a context
import os
import signal
import time

import nbdist

ctx = nbdist.context("multiprocess")
factor = 3


class Point:
    def __init__(self, x):
        self.x = x


# %% a pool
def work(p):
    print("at", p.x)
    return Point(p.x * factor)


with ctx.Pool(2) as pool:
    points = pool.map(work, [Point(i) for i in range(4)])
print([type(p) is Point and p.x for p in points])


# %% lines that take long
class Slow(Point):
    def __str__(self):
        time.sleep(0.4 + 0.1 * self.x)
        return str(self.x)


with ctx.Pool(2) as pool:
    pool.map(lambda i: print("at", Slow(i), "again", Slow(i)), range(4), chunksize=1)

# %% CUDA live in the kernel
import threading

import torch

torch.cuda._initialized = True
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
driver = threading.Lock()
threading.Thread(target=lambda: driver.acquire() and time.sleep(1000), daemon=True).start()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        locked = "driver" in globals()
        return torch.tensor([torch.cuda._is_in_bad_fork(), torch.cuda._initialized, locked, os.getpid()])


if (child := os.fork()) == 0:
    os._exit(torch.cuda._is_in_bad_fork() + 2 * torch.cuda._initialized + 4 * driver.locked())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "so it is in a fork of the kernel"

# %% a loader with it
ctx = nbdist.context("multiprocessing")
batches = list(torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=ctx))
print([batch[0, :3].tolist() for batch in batches], len({int(batch[0, 3]) for batch in batches}))
print(nbdist.parallel_map(lambda i: torch.cuda._is_in_bad_fork(), range(2), progress=False))

# %% a script that ends before its process
import os
import time

import nbdist

ctx = nbdist.context("multiprocessing")
at_its_end = __file__ + " is at its end"


def work():
    while not os.path.exists(at_its_end):
        time.sleep(0.01)
    time.sleep(0.5)
    print("worked")


ctx.Process(target=work).start()
print("end of script", flush=True)
open(at_its_end, "w").close()

# %% pools of joblib
import multiprocessing

import numpy as np
from joblib import Parallel, delayed

import nbdist

nbdist.context("multiprocessing")
before = multiprocessing.get_start_method()
multiprocessing.set_start_method("nbdist", force=True)
factor, big = 3, np.arange(300_000.0)


class Row:
    def __init__(self, x):
        self.x = x


def times(row):
    return Row(factor * row.x)


def mapped(fn, *items):
    return Parallel(n_jobs=2, backend="multiprocessing")(delayed(fn)(item) for item in items)


rows = mapped(times, *mapped(times, Row(1), Row(2)))
multiprocessing.set_start_method(before, force=True)
print([row.x for row in rows], {type(row) for row in rows} == {Row}, mapped(lambda i: float(big[i]), 7))


# %% interrupts that others take
import contextlib
import signal
import threading


@contextlib.contextmanager
def others_take_interrupts():
    thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def late():
    with others_take_interrupts():
        print("begun", flush=True)
        time.sleep(1000)

"""Cells of test_parallel.py."""

# %% in a notebook
from nbdist import parallel_map

scale = 3


def work(i):
    print("item", i)
    return i * scale


print(parallel_map(work, range(6), 2))

# %% a traceback
from nbdist import parallel_map


def work(i):
    return 1 / (i - 3)


parallel_map(work, range(6), 2, progress=False)

# %% workers that clean up
import time

from nbdist import parallel_map


def work(i):
    try:
        print("begun")
        time.sleep(1000)
    finally:
        print("cleaned up")


parallel_map(work, range(10), 2, progress=False)

# %% fastcore
from fastcore.parallel import parallel

import nbdist

nbdist.context("multiprocessing")
scale = 5
print(parallel(lambda x: x * scale, range(4), n_workers=2, method="nbdist"))

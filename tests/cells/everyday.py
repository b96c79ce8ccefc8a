"""Cells of test_everyday_cells.py."""

# %% first cell
import time

import torch
import torch.distributed as dist

from nbdist import Session, in_ddp


def sums():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


# %% what a rank has of its own
shell, read = get_ipython(), input


def own(mine=get_ipython):
    shell.run_line_magic("alias", "nothing true")
    return shell is mine() is get_ipython(), read is input, shell


# %% an exception that is caught
try:
    in_ddp(2, divide, 0)
except ZeroDivisionError:
    print("caught")


# %% plots and HTML
def show():
    plt.plot([1, 2, 3])
    plt.show()
    display(HTML("<b>bold</b>"))


in_ddp(2, show)

# %% naps
import os

session = Session(2)


def naps():
    while not os.path.exists("seen"):
        time.sleep(0.05)
    print("awake")
    return 5


# %% a timeout
def waits():
    if dist.get_rank() == 0:
        sums()


there = CallClock(lambda: one_answered(session) and "rank 0 waits in" in session.stacks())
with Session(2, timeout=1000) as session, there:
    session.run(waits)


# %% a failure in a collective
def fails():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    sums()


session.run(fails)

# %% a frame
import numpy as np
import pandas as pd

frame = pd.DataFrame({"x": np.arange(1_000_000.0), "y": 1})


def reads():
    frame.loc[0, "x"] = 5.0
    return frame.x.sum(), frame.head(2)


total, head = in_ddp(2, reads)
print(total == frame.x.sum() + 5, frame.x[0])
head  # noqa: B018


# %% an interrupt
def sleeps():
    print("asleep", flush=True)
    time.sleep(1000)


in_ddp(2, sleeps)

"""Cells and scripts of test_output.py."""

# %% first cell
import ctypes
import inspect
import logging
import os
import subprocess
import sys
import threading
import time
import warnings

import torch.distributed as dist

from nbdist import Session, in_ddp


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)


# %% everything that writes
def f():
    print("print")
    logging.basicConfig(level=logging.INFO)
    logging.info("logging")
    warnings.warn("warning", stacklevel=1)
    os.write(1, b"descriptor 1\n")
    os.write(2, b"descriptor 2\n")
    subprocess.run(["sh", "-c", "echo child; echo complaint >&2"])
    ctypes.CDLL(None).puts(b"C")
    ctypes.CDLL(None).fflush(None)
    print("ünï€odé 😀", "x" * 10_000)
    sys.stdout.buffer.write(b"bytes\n")
    print("no newline", end="")


in_ddp(2, f)


# %% displays
def f():
    import pandas as pd
    from IPython.display import HTML, clear_output, display, update_display

    print("first")
    display(pd.DataFrame({"a": [1]}))
    print("second")
    display(HTML("<b>bold</b>"), display_id="mine")
    print("third", file=sys.stderr)
    update_display(HTML("<b>bolder</b>"), display_id="mine")
    clear_output(wait=True)
    print("last")


in_ddp(2, f)


# %% figures
def f():
    import matplotlib.pyplot as plt

    plt.plot([1, 2])
    plt.show()
    print("between")
    plt.plot([2, 1])


in_ddp(2, f)


# %% plain tqdm
def f():
    from tqdm import tqdm

    for _ in tqdm(range(20)):
        pass
    print("done")


in_ddp(2, f)


# %% widget of tqdm
def f():
    from tqdm.auto import tqdm

    for i in tqdm(range(20), mininterval=0):
        if i == 10:
            wait_for("seen")


in_ddp(2, f)


# %% rich
def f():
    from rich import print
    from rich.progress import track

    print("[bold]before[/bold]")
    for _ in track(range(3), description="Rich"):
        time.sleep(0.01)


in_ddp(2, f)


# %% an output widget
def f():
    from ipywidgets import Output

    with Output():
        print("inside")
        print(1 / 0)
    print("outside")
    get_ipython().run_line_magic("timeit", "-n1 -r1 1")


in_ddp(2, f)


# %% bar of fastprogress
def f():
    from fastprogress.fastprogress import master_bar, progress_bar

    bar = master_bar(range(3))
    bar.write(["epoch", "loss"], table=True)
    for epoch in bar:
        for _ in progress_bar(range(10), parent=bar):
            time.sleep(0.04)
        bar.write([str(epoch), f"0.{epoch}"], table=True)
        wait_for(f"seen{epoch}")


in_ddp(2, f)


# %% all ranks with prefix
def f():
    rank = dist.get_rank()
    for turn in range(2):
        if rank == turn:
            print("a", end="")
            print("b\nc")
            print("complaint", file=sys.stderr)
            display(f"shown {rank}")
            print("no newline", end="")
        dist.barrier()


with Session(2, output="all") as session:
    session.run(f)


# %% logs
def f():
    print("from", dist.get_rank())
    print("complaint", file=sys.stderr)
    display("shown")
    os.write(1, b"end")


session.run(f)


# %% much output at once
def f():
    for i in range(20_000):
        print("out", dist.get_rank(), i)
        print("err", dist.get_rank(), i, file=sys.stderr)


with Session(2, output="all", lines=None) as session:
    session.run(f)


# %% a flood
def f():
    for i in range(30_000):
        print("line", i)
    from IPython.display import HTML, display

    display(HTML("between"))
    for i in range(5):
        print("after", i)


in_ddp(2, f)


# %% a flood without end
def f():
    while True:
        print("flood")


in_ddp(2, f)


# %% workers of a data loader
def f():
    from torch.utils.data import DataLoader

    class Data:
        def __len__(self):
            return 2000

        def __getitem__(self, i):
            print("worker", i)
            return i

    assert len(list(DataLoader(Data(), batch_size=50, num_workers=2))) == 40


in_ddp(2, f)


# %% threads
def f():
    def work(n):
        for i in range(500):
            sys.stdout.write(f"thread {n} {i} {'x' * 5000}\n")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


in_ddp.options(lines=None)(2, f)


# %% source of a notebook function
def g():
    return 42  # the answer


def f():
    print(inspect.getsource(g))


in_ddp(2, f)

# %% training with fastai
from nbdist import in_ddp
from nbdist.recsys.datasets import synthetic_ratings

ratings = synthetic_ratings(n_ratings=2000, n_users=100, n_items=100).frame.to_pandas()


def train(epochs):
    from tqdm.auto import tqdm

    dls = CollabDataLoaders.from_df(ratings, bs=64)
    learn = collab_learner(dls, n_factors=5, y_range=(0, 5.5))
    with learn.distrib_ctx():
        learn.fit_one_cycle(epochs, 5e-3)
    for _ in tqdm(range(1000), mininterval=0):
        pass
    dls.show_batch()


in_ddp(2, train, 3, imports="from fastai.collab import *; from fastai.distributed import *")

# %% a script
import os
import sys

import torch.distributed as dist

from nbdist import in_ddp


def f():
    print("from", dist.get_rank())
    print("complaint", file=sys.stderr)
    os.write(1, b"raw\n")
    sys.stdout.flush()
    from IPython.display import display

    display([dist.get_rank()])
    print("end", end="")


if __name__ == "__main__":
    in_ddp(2, f)
    print("after")

# %% a script in a pipe
import os
import time

from nbdist import in_ddp


def f():
    print("now")
    while not os.path.exists("seen"):
        time.sleep(0.01)


in_ddp(1, f)

# %% a figure that is returned
from nbdist import in_ddp


def draw():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2])
    return figure


figure = in_ddp(2, draw)
figure  # noqa: B018

"""Scripts of test_workflow_on_ranks.py."""

# %% script
import sys

import polars as pl

from nbdist.recsys.etl import Categorify, Workflow

frame = pl.DataFrame({"user": range(1_000_000)})
Workflow(Categorify("user")).fit(frame, progress=False).write(
    frame, sys.argv[1], num_files=50, row_group_size=2000, memory_bytes=1 << 20, progress=False
)

# %% larger than memory
import sys
import threading

import polars as pl
import psutil

from nbdist.recsys.etl import Categorify, Join, Workflow, write_history


def resident():
    return psutil.Process().memory_info().rss


folder, out, what = sys.argv[1:]
table = pl.DataFrame({"item": range(1000), "tags": [list(range(i % 6)) for i in range(1000)]})
workflow = Workflow(Join(table, on="item"), Categorify("user", "item", "tags"))
done, most = threading.Event(), 0


def watch():
    global most
    while not done.wait(0.002):
        most = max(most, resident())


for name in ("small", "large"):  # the first one brings in what is there once
    if name == "large":
        before = resident()
        thread = threading.Thread(target=watch)
        thread.start()
    files = f"{folder}/{name}"
    options = {"memory_bytes": 16 << 20, "row_group_size": 1 << 14, "progress": False}
    if what == "histories":
        write_history(files, f"{out}/{name}", "item", by="user", time="f0", length=40, **options)
    else:
        workflow.fit(files, memory_bytes=16 << 20, progress=False)
        workflow.write(files, f"{out}/{name}", **options)
done.set()
thread.join()
print(most - before)

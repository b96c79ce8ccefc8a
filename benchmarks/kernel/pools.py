"""Pools and processes of a notebook, compared with other libraries: `python -m benchmarks.kernel.pools`.

All of nbdist's figures are taken in a real kernel with torch and fastai imported, after threads were used, with
functions of cells. So are the figures of the others who can: joblib, `concurrent.futures` and multiprocess' `fork`,
which forks that kernel, and ipyparallel. The standard library's `fork` has a clean process of its own with the same
imports, as what it is like where that is safe, in turns with nbdist; `spawn` has a script, whose functions it can
import.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import conditions, save
from benchmarks.notebook import CellError, Kernel

PACKAGES = ("torch", "fastai", "multiprocess", "joblib", "ipyparallel", "ipykernel")

#: Run as a cell, and as a script by those who need one.
COMMON = """
import functools, json, os, signal, sys, time
import numpy as np, pandas as pd, psutil, torch
import torch.utils.data
from fastai.collab import *
from concurrent.futures import ProcessPoolExecutor

scale = 3

def scaled(x):
    return x * scale

def timed(action, repeats):
    action()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return times

def from_making_to_results(context):
    with context.Pool(2) as pool:
        assert pool.map(scaled, range(4)) == [0, 3, 6, 9]

def per_item(map_items, items):
    def action():
        assert map_items(scaled, range(items))[-1] == scaled(items - 1)
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) / items

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.table = np.zeros((20_000, 64), dtype=np.float32)

    def __len__(self):
        return len(self.table)

    def __getitem__(self, i):
        return torch.from_numpy(self.table[i] + i), i

def loading(context):
    begin = time.perf_counter()
    batches = iter(torch.utils.data.DataLoader(Rows(), batch_size=500, num_workers=4, multiprocessing_context=context))
    next(batches)
    first = time.perf_counter() - begin
    begin, rows = time.perf_counter(), sum(len(batch[1]) for batch in batches)
    return first, rows / (time.perf_counter() - begin)
"""

SETUP = """
import multiprocessing, multiprocess, joblib, nbdist
standard, dill = nbdist.context("multiprocessing"), nbdist.context("multiprocess")
torch.set_num_threads(2)
torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # OpenMP's threads are there now
"""

SCRIPT = """
if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context(sys.argv[1])
    print(json.dumps({
        "pool": timed(lambda: from_making_to_results(context), int(sys.argv[2])),
        "loader": [loading(context) for _ in range(int(sys.argv[3]))],
    }))
"""

CONTEXTS = {'nbdist.context("multiprocessing")': "standard", "nbdist.context()": "dill"}

#: Each with an expression that maps `f` over `items`: a message for every item.
ONE_BY_ONE = {
    "`nbdist.context().Pool`": "dill_pool.map(f, items, chunksize=1)",
    '`nbdist.context("multiprocessing").Pool`': "standard_pool.map(f, items, chunksize=1)",
    "`nbdist.parallel_map`, its start included": "nbdist.parallel_map(f, items, 2, chunk=1, progress=False)",
    "`multiprocess.Pool`, `fork`": "forked_dill.map(f, items, chunksize=1)",
    "`multiprocessing.Pool`, `fork`": "forked.map(f, items, chunksize=1)",
    "`concurrent.futures`, `fork`": "list(executor.map(f, items))",
    "joblib (loky), batches of 1": "parallel(joblib.delayed(f)(i) for i in items)",
    "ipyparallel, load balanced": "balanced.map_sync(f, items, chunksize=1)",
}
#: As many at once as each takes by itself, or as its argument says where it has one.
AT_ONCE = {
    "`nbdist.parallel_map`, its start included": "nbdist.parallel_map(f, items, 2, progress=False)",
    "`nbdist.context().Pool`": "dill_pool.map(f, items)",
    '`nbdist.context("multiprocessing").Pool`': "standard_pool.map(f, items)",
    "`multiprocess.Pool`, `fork`": "forked_dill.map(f, items)",
    "`multiprocessing.Pool`, `fork`": "forked.map(f, items)",
    "`concurrent.futures`, `fork`, `chunksize` an eighth of a worker's": (
        "list(executor.map(f, items, chunksize=len(items) // 16))"
    ),
    "joblib (loky), batches of its own": "free(joblib.delayed(f)(i) for i in items)",
    "ipyparallel, direct view": "view.map_sync(f, items)",
}
#: Code that each needs after `COMMON` and `SETUP`; those who fork the kernel do so before there is more.
LIVE = {
    "`multiprocess.Pool`": "forked_dill = multiprocess.get_context('fork').Pool(2)",
    "`multiprocessing.Pool`": "forked = multiprocessing.get_context('fork').Pool(2)",
    "`concurrent.futures`": (
        "executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork'))\n"
        "list(executor.map(scaled, [1]))"
    ),
    "joblib": (
        "parallel, free = joblib.Parallel(n_jobs=2, batch_size=1), joblib.Parallel(n_jobs=2)\n"
        "parallel(joblib.delayed(scaled)(i) for i in range(4))"
    ),
    "ipyparallel": (
        "import ipyparallel; cluster = ipyparallel.Cluster(n=2, log_level=40)\n"
        "client = cluster.start_and_connect_sync()\n"
        "view, balanced = client[:], client.load_balanced_view(); view.block = True; view.push(dict(scale=scale))"
    ),
    "`nbdist.context()": "dill_pool = dill.Pool(2)",
    '`nbdist.context("': "standard_pool = standard.Pool(2)",
}

MEMORY = """
frame = pd.DataFrame({f"c{i}": np.random.rand(6_250_000) for i in range(10)})  # 500 MB

def total(i):
    value = float(sum(frame[c].sum() for c in frame))
    time.sleep(1.0)  # until all have read it
    memory = psutil.Process().memory_full_info()
    return value, memory.pss, memory.uss

def nothing(i):
    time.sleep(1.0)
    memory = psutil.Process().memory_full_info()
    return 0.0, memory.pss, memory.uss

def grown(context):
    with context.Pool(8) as pool:
        small = pool.map(nothing, range(8), chunksize=1)
        big = pool.map(total, range(8), chunksize=1)
    shared = sum(pss for _, pss, _ in big) - sum(pss for _, pss, _ in small)
    return shared, max(uss for _, _, uss in big) - max(uss for _, _, uss in small)
"""

DEATHS = """
def dying(phase):
    def work(i):
        if phase == "in a task":
            time.sleep(60)
        return b"x" * 50_000_000 if phase == "while a result is sent" else i
    def begin():
        if phase == "in the initializer":
            time.sleep(60)
    with standard.Pool(2, begin) as pool:
        if phase == "while a result is sent":
            pool._outqueue._wlock.acquire()
        result = pool.map_async(work, range(4), chunksize=1)
        time.sleep(0.3)
        for worker in pool._pool[:2]:
            os.kill(worker.pid, signal.SIGKILL)
        start = time.perf_counter()
        try:
            (pool.map_async(work, range(4)) if phase == "idle" else result).get(30)
        except nbdist.WorkerDied:
            return time.perf_counter() - start
"""


def script(method: str, repeats: int, loads: int) -> dict[str, Any]:
    """Return what a clean process measures with a start method of the standard library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(COMMON + SCRIPT)
        command = [sys.executable, str(path), method, str(repeats), str(loads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def milliseconds(times: list[float], digits: int = 1) -> str:
    return f"{statistics.median(times) * 1000:.{digits}f} ms"


def per_item_rows(kernel: Kernel, contestants: Mapping[str, str], items: int, rounds: int) -> list[str]:
    """Rows of the time for an item, of contestants that take turns; the first is what the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    failures: dict[str, str] = {}
    for number in range(rounds + 1):  # the first is to get warm
        for name, expression in contestants.items():
            if name in failures:
                continue
            try:
                value = kernel.value(f"per_item(lambda f, items: {expression}, {items})", 60)
            except (CellError, TimeoutError) as error:
                failures[name] = f"fails: {type(error).__name__}: {str(error).splitlines()[-1][:80]}"
                continue
            times[name] += [value] if number else []
    rows, first = [], next(iter(contestants))
    for name, own in times.items():
        if name in failures:
            rows.append(f"| {name} | {failures[name]} | |")
            continue
        ratio = statistics.median(mine / other for mine, other in zip(own, times[first], strict=True))
        rows.append(f"| {name} | {statistics.median(own) * 1e6:.1f} µs | {ratio:.2f} × |")
    return rows


def starts_and_loaders(kernel: Kernel, rounds: int, repeats: int) -> list[str]:
    """From making a pool to its results, and a loader's first batch and throughput, in turns with clean processes."""
    started: dict[str, list[float]] = {}
    loaded: dict[str, list[list[float]]] = {}
    kernel.run("from_making_to_results(standard); loading(standard)")
    for number in range(rounds):  # in turns: what disturbs one disturbs all
        for name, contestant in CONTEXTS.items():
            times = kernel.value(f"timed(lambda: from_making_to_results({contestant}), {repeats})")
            started.setdefault(f"`{name}`, in the kernel", []).extend(times)
        loaded.setdefault('`nbdist.context("multiprocessing")`, in the kernel', []).append(
            kernel.value("loading(standard)")
        )
        for method in ("fork", "spawn")[: 2 if number == 0 else 1]:
            found = script(method, repeats if method == "fork" else 1, 1)
            started.setdefault(f"`{method}`, in a clean process", []).extend(found["pool"])
            loaded.setdefault(f"`{method}`, in a clean process", []).extend(found["loader"])
    fork = statistics.median(started["`fork`, in a clean process"])
    lines = ["| `Pool(2).map` of a function, from making the pool to its results | | |", "|---|---:|---:|"]
    for name, times in started.items():
        lines.append(f"| {name} | {milliseconds(times)} | {statistics.median(times) / fork:.2f} × `fork` |")
    lines += ["", "| `DataLoader(num_workers=4)` | first batch | rows/s after it |", "|---|---:|---:|"]
    for name, found in loaded.items():
        rows = statistics.median(rate for _, rate in found)
        lines.append(f"| {name} | {milliseconds([first for first, _ in found], 0)} | {rows:,.0f} |")
    return lines


def memory_and_deaths(kernel: Kernel, rounds: int) -> list[str]:
    """Measure what big data take in 8 workers, and how soon the death of a worker is known."""
    kernel.run(MEMORY)
    grown, private = kernel.value("grown(standard)")
    lines = ["", f"8 workers that have read a frame of 500 MB: {grown / 1e6:.0f} MB more in all (sum of their "]
    lines[-1] += f"proportional set sizes), {private / 1e6:.0f} MB of its own for the one that has most."
    kernel.run(DEATHS)
    lines += ["", "| workers killed | until `WorkerDied` |", "|---|---:|"]
    for phase in ("idle", "in the initializer", "in a task", "while a result is sent"):
        times = [kernel.value(f"dying({phase!r})") for _ in range(rounds)]
        lines.append(f"| {phase} | {milliseconds([time for time in times if time is not None])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="show that everything works")
    parser.add_argument("--items", action="store_true", help="the time for an item alone; leaves results/ alone")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    rounds, repeats, items = (1, 3, 200) if options.quick else (3, 7, 2000)
    lines = ["# Pools and processes", ""]
    kernel = Kernel()
    try:
        kernel.run(COMMON)
        kernel.run(LIVE["ipyparallel"])
        kernel.run(SETUP)
        if not options.items:
            lines += [*starts_and_loaders(kernel, rounds, repeats), *memory_and_deaths(kernel, rounds)]
        for live in dict.fromkeys(LIVE.values()):
            if live != LIVE["ipyparallel"]:
                kernel.run(live)
        for title, contestants, number in (
            (f"{items} items, one by one", ONE_BY_ONE, items),
            (f"{100 * items} items, as many at once as each takes", AT_ONCE, 100 * items),
        ):
            lines += ["", f"| {title}, on 2 workers: time for each | | |", "|---|---:|---:|"]
            lines += per_item_rows(kernel, contestants, number, rounds * 2 + 1)
    finally:
        kernel.close()
    save("pools", [*lines, "", *conditions(PACKAGES)], keep=not (options.print or options.quick or options.items))


if __name__ == "__main__":
    main()

"""Pools and processes of a notebook, beside those who make them otherwise: `python -m benchmarks.kernel.pools`.

All of nbdist's figures are taken in a real kernel with torch and fastai imported, after threads were used, with
functions of cells. So are those of the others who can: joblib, `concurrent.futures` and multiprocess' `fork`, which
forks that kernel, and ipyparallel. The standard library's `fork` has a clean process of its own with the same imports,
as what it is like where that is safe, in turns with nbdist; `spawn` has a script, whose functions it can import.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
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

def per_item(map_one_by_one, items, repeats):
    def action():
        assert map_one_by_one(scaled, range(items))[-1] == scaled(items - 1)
    return [seconds / items for seconds in timed(action, repeats)]

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

PER_ITEM = {
    "`nbdist.context().Pool`": "per_item(lambda f, items: dill_pool.map(f, items, chunksize=1), {items}, {repeats})",
    '`nbdist.context("multiprocessing").Pool`': (
        "per_item(lambda f, items: standard_pool.map(f, items, chunksize=1), {items}, {repeats})"
    ),
    "`nbdist.parallel_map`, its start included": (
        "per_item(lambda f, items: nbdist.parallel_map(f, items, 2, chunk=1, progress=False), {items}, {repeats})"
    ),
    "`nbdist.parallel_map` with chunks of its own, its start included": (
        "per_item(lambda f, items: nbdist.parallel_map(f, items, 2, progress=False), {items}, {repeats})"
    ),
    "`multiprocess.Pool`, `fork`": (
        "per_item(lambda f, items: forked_dill.map(f, items, chunksize=1), {items}, {repeats})"
    ),
    "`multiprocessing.Pool`, `fork`": (
        "per_item(lambda f, items: forked.map(f, items, chunksize=1), {items}, {repeats})"
    ),
    "`concurrent.futures`, `fork`": "per_item(lambda f, items: list(executor.map(f, items)), {items}, {repeats})",
    "joblib (loky), batches of 1": (
        "per_item(lambda f, items: parallel(joblib.delayed(f)(i) for i in items), {items}, {repeats})"
    ),
    "ipyparallel, load balanced": (
        "per_item(lambda f, items: balanced.map_sync(f, items, chunksize=1), {items}, {repeats})"
    ),
    "ipyparallel, direct view, all items at once": (
        "per_item(lambda f, items: view.map_sync(f, items), {items}, {repeats})"
    ),
}
#: What each has to have beside `COMMON` and `SETUP`; those who fork the kernel do so before there is more.
LIVE = {
    "`multiprocess.Pool`": "forked_dill = multiprocess.get_context('fork').Pool(2)",
    "`multiprocessing.Pool`": "forked = multiprocessing.get_context('fork').Pool(2)",
    "`concurrent.futures`": (
        "executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork'))\n"
        "list(executor.map(scaled, [1]))"
    ),
    "joblib": (
        "parallel = joblib.Parallel(n_jobs=2, batch_size=1)\nparallel(joblib.delayed(scaled)(i) for i in range(4))"
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
    """What a clean process measures with a start method of the standard library."""
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="show that everything works")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    rounds, repeats, items = (1, 3, 200) if options.quick else (3, 7, 2000)
    lines = ["# Pools and processes", ""]

    def attempt(action: Callable[[], Any], show: Callable[[Any], str]) -> str:
        try:
            return show(action())
        except (CellError, RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            return f"fails: {type(error).__name__}: {str(error).splitlines()[-1][:80]}"

    kernel = Kernel()
    try:
        kernel.run(COMMON)
        kernel.run(LIVE["ipyparallel"])
        kernel.run(SETUP)
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
        lines += ["| `Pool(2).map` of a function, from making the pool to its results | | |", "|---|---:|---:|"]
        for name, times in started.items():
            lines.append(f"| {name} | {milliseconds(times)} | {statistics.median(times) / fork:.2f} × `fork` |")
        lines += ["", "| `DataLoader(num_workers=4)` | first batch | rows/s after it |", "|---|---:|---:|"]
        for name, found in loaded.items():
            rows = statistics.median(rate for _, rate in found)
            lines.append(f"| {name} | {milliseconds([first for first, _ in found], 0)} | {rows:,.0f} |")
        kernel.run(MEMORY)
        grown, private = kernel.value("grown(standard)")
        lines += ["", f"8 workers that have read a frame of 500 MB: {grown / 1e6:.0f} MB more in all (sum of their "]
        lines[-1] += f"proportional set sizes), {private / 1e6:.0f} MB of its own for the one that has most."
        kernel.run(DEATHS)
        lines += ["", "| workers killed | until `WorkerDied` |", "|---|---:|"]
        for phase in ("idle", "in the initializer", "in a task", "while a result is sent"):
            times = [kernel.value(f"dying({phase!r})") for _ in range(rounds)]
            lines.append(f"| {phase} | {milliseconds([time for time in times if time is not None])} |")
        lines += ["", f"| {items} items, one by one, on 2 workers: time for each | |", "|---|---:|"]
        for name, expression in PER_ITEM.items():
            live = next((code for key, code in LIVE.items() if name.startswith(key)), "")
            if live and not name.startswith("ipyparallel"):
                failure = attempt(lambda live=live: kernel.run(live), lambda _: "")
                if failure:
                    lines.append(f"| {name} | {failure} |")
                    continue
            code = expression.format(items=items, repeats=max(3, repeats // 2))
            shown = attempt(
                lambda code=code: kernel.value(code, 60), lambda times: f"{statistics.median(times) * 1e6:.0f} µs"
            )
            lines.append(f"| {name} | {shown} |")
    finally:
        kernel.close()
    save("pools", [*lines, "", *conditions(PACKAGES)], keep=not (options.print or options.quick))


if __name__ == "__main__":
    main()

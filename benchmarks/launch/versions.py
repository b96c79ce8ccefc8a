"""Another version of nbdist compared with this one, in turns: `python -m benchmarks.launch.versions OTHER`.

OTHER is the folder of the other version, such as a worktree of what was there before a change. Each has kernels of its
own; they take turns, so that what else the machine does hits both.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.machine import conditions, save
from benchmarks.notebook import Kernel

KERNELS = 3
TURNS = 15

SETUP = """
import time
import numpy as np, pandas as pd, torch
from nbdist import Session, in_ddp, warm

def seconds(fn, *args, **kwargs):
    begin = time.perf_counter()
    fn(*args, **kwargs)
    return time.perf_counter() - begin

def noop(*args): return None
def tensor(): return torch.full((75_000_000,), 1.5)
def boom(): raise ValueError("in a rank")
def failed(ranks):
    try:
        in_ddp(ranks, boom)
    except ValueError:
        pass
def opened(ranks):
    with Session(ranks) as session:
        session.run(noop)
frame = pd.DataFrame({f"c{i}": np.random.default_rng(i).random(6_250_000) for i in range(10)})
"""

#: What is measured, in the order in which it is: an expression for its seconds.
ROWS = {
    "first call in a fresh kernel": "seconds(in_ddp, 2, noop)",
    "warm `in_ddp(2, f)`": "seconds(in_ddp, 2, noop)",
    "warm `in_ddp(8, f)`": "seconds(in_ddp, 8, noop)",
    "`in_ddp(2, f)` where `f` raises": "seconds(failed, 2)",
    "a session of 2 opened, called, closed": "seconds(opened, 2)",
    "300 MB tensor back": "seconds(in_ddp, 2, tensor)",
    "no-op call in a live session, one after the other": "seconds(lambda: [session.run(noop) for _ in range(50)]) / 50",
    "… the first of its cell": "seconds(session.run, noop)",
}
#: The same for what comes after a first frame, with which all ranks find pandas imported.
WITH_PANDAS = {
    "warm `in_ddp(2, f)`, with pandas": "seconds(in_ddp, 2, noop)",
    "warm `in_ddp(8, f)`, with pandas": "seconds(in_ddp, 8, noop)",
    "500 MB frame to 2 fresh ranks": "seconds(in_ddp, 2, noop, frame)",
    "500 MB frame to 2 live ranks, again": "seconds(session.run, noop, frame)",
}


def main() -> None:
    versions = {"before": Path(sys.argv[1]).resolve(), "now": ROOT}
    rows = {**ROWS, **WITH_PANDAS}
    found: dict[str, dict[str, list[float]]] = {row: {name: [] for name in versions} for row in rows}
    for _ in range(KERNELS):
        with contextlib.ExitStack() as stack:
            kernels = {}
            for name, folder in versions.items():
                kernels[name] = kernel = Kernel(folder)
                stack.callback(kernel.close)
                kernel.run(SETUP)
            first, *others = rows.items()
            for name, kernel in kernels.items():
                found[first[0]][name].append(kernel.value(first[1]))
                kernel.run("session = Session(2); session.run(noop)")
            for row, expression in others:
                if row == next(iter(WITH_PANDAS)):
                    for kernel in kernels.values():
                        kernel.run("session.run(noop, frame)")
                for turn in range(TURNS):
                    for name, kernel in list(kernels.items())[:: 1 if turn % 2 else -1]:
                        found[row][name].append(kernel.value(expression))
    lines = [
        "# A version compared with another",
        "",
        "Milliseconds: median (lower to upper quartile). The ratio is between the medians.",
        "",
        "| | " + " | ".join(versions) + " | now / before |",
        "|---|" + "---:|" * (len(versions) + 1),
    ]
    for row, times in found.items():
        quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
        cells = [
            f"{middle * 1000:.4g} ({low * 1000:.4g}–{high * 1000:.4g})" for low, middle, high in quartiles.values()
        ]
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {quartiles['now'][1] / quartiles['before'][1]:.2f} |")
    save("versions", [*lines, "", *conditions()])


if __name__ == "__main__":
    main()

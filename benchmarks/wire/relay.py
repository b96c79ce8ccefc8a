"""Cost for a training loop of printing a line a batch, shown live in the notebook."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from conftest import Kernel

from benchmarks.machine import conditions, save

#: By how many per cent the loop may be slower with prints.
TARGET = 2

LOOP = """
import psutil, time, torch
from nbdist import Session

def loop(batches, width, prints):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = torch.randn(64, width), torch.randn(64, 1)
    printing = 0.0
    begin = time.perf_counter()
    for batch in range(batches):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if prints:
            line = f"epoch 0, batch {batch}: loss {value:.6f}"
            begin_print = time.perf_counter()
            print(line)
            printing += time.perf_counter() - begin_print
    return time.perf_counter() - begin, printing

def own_cpu():
    times = psutil.Process().cpu_times()
    return times.user + times.system

session = Session(2, threads=1)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30, help="pairs of runs, with and without prints in turn")
    parser.add_argument("--batches", type=int, default=500, help="batches of a run")
    parser.add_argument("--width", type=int, default=400, help="of the model: decides how long a batch takes")
    options = parser.parse_args()

    walls, prints_only, kernels = (Measured() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.ok(LOOP)
            for pair in range(-1, options.repeats):  # the first is for warming up
                for prints in (False, True) if pair % 2 else (True, False):
                    call = f"session.run_all(loop, {options.batches}, {options.width}, {prints})"
                    printed = kernel.ok(f"before = own_cpu(); times = {call}; after = own_cpu()").text.count("\n")
                    assert printed == options.batches * prints, f"{printed} lines arrived"
                    if pair >= 0:
                        shown = kernel.ok("print(*map(max, zip(*times)), after - before)").text.split()
                        for measured, value in zip((walls, prints_only, kernels), shown, strict=True):
                            measured[prints].append(float(value) / options.batches)
        finally:
            kernel.close()

    batch = statistics.median(walls[False])
    # Where ranks keep every core busy, what the kernel takes is taken from all of them alike.
    kernel_share = (statistics.median(kernels[True]) - statistics.median(kernels[False])) / (os.cpu_count() or 1)
    share = 100 * (statistics.median(prints_only[True]) + kernel_share) / batch
    lines = [
        "# Printing once a batch",
        "",
        f"2 ranks in a real kernel; {options.batches} batches a run, {options.repeats} runs with a print a batch and "
        "as many without, in turn. Times are per batch in the slower rank: median, and the middle half.",
        "",
        "| | without | with a print | difference |",
        "|---|---:|---:|---:|",
        walls.row("time"),
        prints_only.row("in `print`, of the rank"),
        kernels.row("CPU time of the kernel"),
        "",
        f"Cost: {share:.2f} % of a batch: what `print` takes in the rank, and the kernel's CPU time as far as it falls "
        f"on a core that the rank needs ({os.cpu_count()} cores). Target: less than {TARGET:g} %: "
        f"{'reached' if share < TARGET else '**missed**'}. "
        "The difference of the whole loops is smaller than their spread.",
    ]
    save("relay", [*lines, "", *conditions()])


class Measured(dict[bool, list[float]]):
    """Seconds a batch, without and with prints."""

    def __init__(self) -> None:
        super().__init__({False: [], True: []})

    def row(self, title: str) -> str:
        cells = []
        for prints in (False, True):
            low, middle, high = (1000 * value for value in statistics.quantiles(self[prints], n=4))
            cells.append(f"{middle:.3f} ms ({low:.3f} – {high:.3f})")
        difference = statistics.median(self[True]) - statistics.median(self[False])
        return f"| {title} | {' | '.join(cells)} | {1e6 * difference:+.1f} µs |"


if __name__ == "__main__":
    main()

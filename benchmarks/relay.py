"""What it costs a training loop to print a line a batch, shown live in the notebook: `python benchmarks/relay.py`."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from conftest import Kernel  # noqa: E402
from machine import conditions, save  # noqa: E402

#: The loop must be slower than without prints by less than this.
TARGET = 0.02

LOOP = """
import time, torch
from nbdist import Session

def loop(batches, width, prints):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, y = torch.randn(64, width), torch.randn(64, 1)
    begin = time.perf_counter()
    for batch in range(batches):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if prints:
            print(f"epoch 0, batch {batch}: loss {value:.6f}")
    return time.perf_counter() - begin

session = Session(2, threads=1)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30, help="pairs of runs, with and without prints in turn")
    parser.add_argument("--batches", type=int, default=500, help="batches of a run")
    parser.add_argument("--width", type=int, default=400, help="of the model: decides how long a batch takes")
    options = parser.parse_args()

    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.ok(LOOP)
            for pair in range(-1, options.repeats):  # the first is for warming up
                for prints in (False, True) if pair % 2 else (True, False):
                    cell = f"t = session.run_all(loop, {options.batches}, {options.width}, {prints})"
                    printed = kernel.ok(cell).text.count("\n")
                    assert printed == options.batches * prints, f"{printed} lines arrived"
                    if pair >= 0:
                        seconds[prints].append(float(kernel.ok("print(max(t))").text))
        finally:
            kernel.close()

    plain, printing = (statistics.median(seconds[prints]) for prints in (False, True))
    ratios = [b / a for a, b in zip(seconds[False], seconds[True], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    lines = [
        "# Printing once a batch",
        "",
        f"2 ranks in a real kernel; {options.batches} batches a run, {options.repeats} runs with prints and as many "
        "without, in turn. A run's time is that of the slower rank.",
        "",
        "| | median | middle half | a batch |",
        "|---|---:|---:|---:|",
    ]
    for prints, median in ((False, plain), (True, printing)):
        first, _, third = statistics.quantiles(seconds[prints], n=4)
        what = "with a print a batch" if prints else "without"
        lines.append(
            f"| {what} | {median:.3f} s | {first:.3f} – {third:.3f} s | {1000 * median / options.batches:.3f} ms |"
        )
    verdict = "reached" if middle - 1 < TARGET else "**missed**"
    lines += [
        f"| slower by (pair by pair) | {100 * (middle - 1):+.2f} % | {100 * (low - 1):+.2f} – {100 * (high - 1):+.2f} % | "
        f"{1e6 * (middle - 1) * plain / options.batches:+.1f} µs |",
        "",
        f"Target: less than {100 * TARGET:g} % slower: {verdict}.",
    ]
    save("relay", [*lines, "", *conditions()])


if __name__ == "__main__":
    main()

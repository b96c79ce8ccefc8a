"""Ten thousand calls of all sorts in one real kernel, by a seeded schedule: what grows by them."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import ROOT
from benchmarks.machine import conditions, save
from benchmarks.notebook import Kernel

#: Steps from one look at what is held to the next.
INTERVAL = 100
#: Seconds that these steps may take, on a machine that does much else.
LIMIT = 600.0

PREPARE = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from soak import Soak
soak = Soak({{seed}})
def some(count):
    for _ in range(count):
        soak.step()
    return soak.held()
"""
#: The beginning of the notice of a call that hangs: none of these does.
VERDICT = "this call hangs"
TITLES = ("descriptors", "threads", "ranks", "memory, MB", "server's descriptors", "server's memory, MB")


def measure(steps: int, seed: int) -> tuple[list[list[float]], dict[str, int], int]:
    """Resources held before, and after each interval; how often each thing was done; and verdicts of a hang."""
    with contextlib.closing(Kernel()) as kernel:
        kernel.run(PREPARE.format(seed=seed))
        held = [kernel.value(f"some({INTERVAL})", LIMIT)]
        for done in range(INTERVAL, steps, INTERVAL):
            held.append(kernel.value(f"some({INTERVAL})", LIMIT))
            about = dict(zip(TITLES, held[-1], strict=True)) | {"verdicts of a hang": kernel.shown.count(VERDICT)}
            print(done + INTERVAL, json.dumps(about), flush=True)
        done = kernel.value("soak.done")
        kernel.run("soak.close()")
        return held, done, kernel.shown.count(VERDICT)


def draw(held: list[list[float]], path: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(11, 5), sharex=True, layout="constrained")
    for axis, title, values in zip(axes.flat, TITLES, zip(*held, strict=True), strict=True):
        axis.plot([INTERVAL * (number + 1) for number in range(len(values))], values)
        axis.set_title(title)
        axis.set_ylim(0, max(values) * 1.3)
    for axis in axes[1]:
        axis.set_xlabel("calls")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    held, done, verdicts = measure(options.steps, options.seed)
    columns = list(zip(*held, strict=True))
    tenth = max(len(held) // 10, 1)
    lines = [
        f"# {options.steps:,} calls in one kernel",
        "",
        "Between calls, every hundred of them: the mean of the first tenth, the mean of the last, the most.",
        "",
        "| | first tenth | last tenth | most |",
        "|---|---:|---:|---:|",
        *(
            f"| {title} | {sum(values[:tenth]) / tenth:.1f} | {sum(values[-tenth:]) / tenth:.1f} | {max(values):.1f} |"
            for title, values in zip(TITLES, columns, strict=True)
        ),
        "",
        "![over the calls](soak.png)",
        "",
        "Done: " + ", ".join(f"{name} {count:,}" for name, count in done.items()) + ".",
        "",
        f"Verdicts of a hang, all of them false alarms: {verdicts}.",
        "",
        *conditions(),
    ]
    if not options.print:
        draw(held, ROOT / "benchmarks" / "results" / "soak.png")
    save("soak", lines, keep=not options.print)


if __name__ == "__main__":
    main()

"""nbdist compared with its peers: launches, memory, big data, calls, training; all in one run, in real kernels.

python -m benchmarks.launch [--quick] [--only ROW ...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import ROOT
from benchmarks.notebook import Kernel

from . import report
from .run import CONTESTANTS, WARM_UP, Peak, Run

NOTEBOOK = [name for name, where in CONTESTANTS.items() if where != "script"]
#: Seconds that a contestant may take over one launch with 32 ranks, estimated from its 8.
PATIENCE = 60.0


def first(run: Run) -> None:
    rows, warmed = {"inside": "first_inside", "returned": "first"}, ["after warm()", "again"]

    def turn(name: str) -> dict[str, float]:
        if name == "import":
            begin = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch.distributed, fastai.collab"], check=True, timeout=120)
            return {"returned": time.monotonic() - begin}
        kernel = run.kernel(name)
        if name in warmed:
            kernel.run("import nbdist as package; package.warm(IMPORTS)")
            kernel.run("import fastai.collab, torch.distributed")
            if name == "again":
                _wait_until_idle(kernel)
                kernel.value("measure_launch(nbdist, 2)")
            _wait_until_idle(kernel)
            name = "nbdist"
        found: dict[str, float] = kernel.value(f"measure_launch({name}, 2)")
        return found

    run.sweep(rows, ["import", *CONTESTANTS], turn, 3, 30.0, fresh=True)
    run.sweep(rows, warmed, turn, 11, 200.0, fresh=True)


def _wait_until_idle(kernel: Kernel, seconds: float = 60.0) -> None:
    """Wait until the kernel and all below it have used no processor time for a second."""
    deadline, used = time.monotonic() + seconds, -1.0
    while time.monotonic() < deadline:
        before, used = used, sum(sum(p.cpu_times()[:2]) for p in kernel.processes())
        if used - before < 0.02:
            return
        time.sleep(1.0)


def warm(run: Run) -> None:
    for ranks, budget in ((2, 20.0), (8, 30.0), (32, 60.0)):
        names = list(CONTESTANTS)
        for name in names if ranks == 32 else []:
            seconds = run.values.get("launch_8", {}).get(name)
            if seconds is not None and 4 * min(seconds) > PATIENCE:
                run.absent(
                    [f"launch_{ranks}_inside", f"launch_{ranks}"],
                    [name],
                    f"not run: 8 ranks took {min(seconds):.0f} s, 32 fresh interpreters would take minutes",
                )
                names = [other for other in names if other != name]
        rows = {"inside": f"launch_{ranks}_inside", "returned": f"launch_{ranks}"}
        run.sweep(
            rows,
            names,
            lambda name, ranks=ranks: run.prepared(name).value(f"measure_launch({name}, {ranks})"),  # type: ignore[misc]
            15 if ranks < 32 else 7,
            budget,
        )


def loop(run: Run) -> None:
    run.sweep(
        {"paused": "paused", "loop": "loop"},
        list(WARM_UP),
        lambda name: run.prepared(name).value(f"measure_loop({name}, 2, 4)"),
        15,
        60.0,
    )
    others = [name for name in CONTESTANTS if name not in WARM_UP]
    run.absent(["paused", "loop"], others, "nothing is kept between launches")


def memory(run: Run) -> None:
    run.sweep(
        {"private": "private", "shared": "shared"},
        list(CONTESTANTS),
        lambda name: run.prepared(name).value(f"measure_memory({name}, 2)"),
        3,
        10.0,
    )


def frame(run: Run) -> None:
    size = 50 if run.quick else 500
    for ranks in (2, 8):

        def turn(name: str, ranks: int = ranks) -> dict[str, float]:
            kernel = run.prepared(name)
            if name == "copy":
                found: dict[str, float] = kernel.value(f"measure_fresh(make_frame({size}), lambda frame: frame.copy())")
                return found
            kernel.run(f"frame = make_frame({size})")
            found = kernel.value(f"measure_frame({name}, {ranks}, frame)")
            kernel.run("del frame")
            return found

        rows = {"inside": f"frame_{ranks}_inside", "returned": f"frame_{ranks}"}
        run.sweep(rows, ["copy", *NOTEBOOK], turn, 7, 20.0)
        run.sweep(
            {"held": f"held_{ranks}", "peak": f"peak_{ranks}"},
            NOTEBOOK,
            lambda name, ranks=ranks: _growth(run.prepared(name), name, ranks, size),  # type: ignore[misc]
            3,
            20.0,
        )
        run.absent([*rows.values(), f"held_{ranks}", f"peak_{ranks}"], ["torchrun"], "a script has no notebook's frame")
        run.absent([f"held_{ranks}", f"peak_{ranks}"], ["copy"], "–")
    run.drop()


def _growth(kernel: Kernel, name: str, ranks: int, size: int) -> dict[str, float]:
    """Return the growth of all processes with the frame's ranks, compared with a tiny frame."""
    kernel.run(f"frame, tiny = make_frame({size}), make_frame(0.001)")
    held, peak = {}, {}
    for which in ("tiny", "frame"):
        with Peak() as watch:
            call = f"measure_held({name}, {ranks}, {which}, '{kernel.mark}')"
            held[which] = kernel.value(call)["held"]
        peak[which] = watch.bytes
    kernel.run("del frame, tiny")
    return {"held": held["frame"] - held["tiny"], "peak": peak["frame"] - peak["tiny"]}


def tensor(run: Run) -> None:
    size = 30 if run.quick else 300

    def turn(name: str) -> dict[str, float]:
        if name == "clone":
            found: dict[str, float] = run.prepared(name).value(
                f"measure_fresh(__import__('torch').full(({size * 250_000},), 1.5), lambda tensor: tensor.clone())"
            )
        else:
            found = run.prepared(name).value(f"measure_tensor({name}, {size})")
        return found

    run.absent(["tensor"], ["torchrun"], "a script returns nothing")
    run.absent(["tensor"], ["spawn"], "returns nothing")
    names = [name for name in NOTEBOOK if name != "spawn"]
    run.sweep({"returned": "tensor"}, ["clone", *names], turn, 7, 30.0)
    run.drop()


def live(run: Run) -> None:
    """Rows for ranks that stay between calls."""
    size, names = 50 if run.quick else 500, ["nbdist", "ipyparallel"]
    for name in names:
        run.prepared(name).run(f"stay = live_{name}(2); call = stay.__enter__()")
    again = {"first": "resend_first", "again": "resend", "seen": "seen"}
    run.sweep(
        {"latency": "latency"}, names, lambda n: {"latency": run.kernel(n).value("measure_latency(call, 50)")}, 8, 60
    )
    run.sweep(again, names, lambda n: run.kernel(n).value(f"measure_again(call, {size})"), 5, 60)
    for name in [name for name in names if name in run.kernels]:
        run.kernel(name).run("stay.__exit__(None, None, None)")
    others = [name for name in CONTESTANTS if name not in names]
    run.absent(["latency", *again.values()], others, "no ranks that stay")
    run.drop()


def training(run: Run) -> None:
    size = "100, 200, 4000, 1" if run.quick else "943, 1682, 100_000, 1"
    # Compared to within 2 %, and two launches of the same differ by 4 %: they get more turns.
    required = ["nbdist", "torchrun", "torchrun_piped"]
    for names, repeats in (([name for name in CONTESTANTS if name not in required], 2), (required, 15)):
        run.sweep(
            {"rate": "rate", "loss": "loss"},
            names,
            lambda name: run.prepared(name).value(f"measure_training({name}, {size})"),
            repeats,
            250.0,
        )
    run.drop()


ROWS = {f.__name__: f for f in (first, warm, loop, memory, frame, tensor, live, training)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data, two turns each: to see that it works")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="some of the rows")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # and leave nothing running
    run, load = Run(arguments.quick), os.getloadavg()[0]
    try:
        for name in arguments.only:
            print(f"{name}:", flush=True)
            ROWS[name](run)
    finally:
        run.drop()
    parts = [] if arguments.only == list(ROWS) else ["--only", *arguments.only]
    command = " ".join(["python -m benchmarks.launch", *["--quick"] * arguments.quick, *parts])
    report.write(arguments.output, run.values, run.reasons, CONTESTANTS, arguments.quick, command, load)


if __name__ == "__main__":
    main()

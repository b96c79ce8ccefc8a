"""nbdist beside its peers: launches, memory, big data, calls, training; all in one run, in real kernels.

python -m benchmarks.launch [--quick] [--only ROW ...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from . import report
from .kernel import ROOT, CellError, Kernel

#: Who takes part, and where its functions come from. A script cannot be given an object of the notebook.
CONTESTANTS = {
    "nbdist": "cells",
    "floor": "module",
    "fabric": "cells",
    "notebook_launcher": "cells",
    "spawn": "module",
    "torchrunx": "cells",
    "ipyparallel": "cells",
    "torchrun": "script",
}
NOTEBOOK = [name for name, where in CONTESTANTS.items() if where != "script"]
WARM = "import nbdist as package; package.warm(IMPORTS)"
#: Seconds that a contestant may take over one launch with 32 ranks, estimated from its 8.
PATIENCE = 60.0


class Run:
    """The kernels, one per contestant, and what was measured: by row and contestant, values or the reason for none."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.kernels: dict[str, Kernel] = {}
        self.values: dict[str, dict[str, list[float]]] = {}
        self.reasons: dict[str, dict[str, str]] = {}

    def kernel(self, name: str) -> Kernel:
        """The contestant's kernel, started if it has none. The tasks are its cells, or what its cells import."""
        if name not in self.kernels:
            kernel = self.kernels[name] = Kernel()
            for module in ("tasks", "contestants"):
                if CONTESTANTS.get(name) in ("module", "script"):
                    kernel.run(f"from benchmarks.{module} import *")
                else:
                    kernel.run((ROOT / "benchmarks" / f"{module}.py").read_text())
        return self.kernels[name]

    def drop(self, *names: str) -> None:
        """End kernels: these, or all."""
        for name in names or tuple(self.kernels):
            if name in self.kernels:
                self.kernels.pop(name).close()

    def sweep(
        self,
        rows: dict[str, str],
        names: list[str],
        turn: Callable[[str], dict[str, Any]],
        repeats: int,
        budget: float,
        fresh: bool = False,
    ) -> None:
        """Let the contestants take turns, so that what disturbs one disturbs all.

        Args:
            rows: The rows this fills, by the number of a turn that goes there.
            names: Who takes part.
            turn: What a contestant does in its turn, and the numbers that it gives.
            repeats: How many turns each gets.
            budget: A contestant that has taken so many seconds gets no further turn.
            fresh: Each turn is in a fresh kernel.
        """
        spent = dict.fromkeys(names, 0.0)
        active = list(names)
        for _ in range(min(repeats, 2) if self.quick else repeats):
            for name in list(active):
                begin = time.monotonic()
                try:
                    numbers = turn(name)
                except (CellError, TimeoutError) as exc:
                    reason = str(exc) if isinstance(exc, CellError) else f"ended after {time.monotonic() - begin:.0f} s"
                    print(f"  {name}: {reason}", flush=True)
                    for row in rows.values():
                        self.reasons.setdefault(row, {}).setdefault(name, reason)
                    active.remove(name)
                    self.drop(name)
                    continue
                for key, row in rows.items():
                    if key in numbers:
                        got = numbers[key] if isinstance(numbers[key], list) else [numbers[key]]
                        self.values.setdefault(row, {}).setdefault(name, []).extend(got)
                print(
                    f"  {name}: {', '.join(f'{rows[k]} {_short(numbers[k])}' for k in rows if k in numbers)}",
                    flush=True,
                )
                spent[name] += time.monotonic() - begin
                if spent[name] > budget:
                    active.remove(name)
                if fresh:
                    self.drop(name)

    def absent(self, rows: list[str], names: list[str], reason: str) -> None:
        for row in rows:
            for name in names:
                self.reasons.setdefault(row, {}).setdefault(name, reason)


def _short(value: Any) -> str:
    return f"{value:.4g}" if not isinstance(value, list) else f"{sorted(value)[len(value) // 2]:.4g}"


# ------------------------------------------------------------------------------------------------------------ rows


def first(run: Run) -> None:
    def turn(name: str) -> dict[str, float]:
        if name == "import":
            begin = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch.distributed, fastai.collab"], check=True, timeout=120)
            return {"returned": time.monotonic() - begin}
        kernel = run.kernel(name)
        if name == "after warm()":
            kernel.run(WARM)
            kernel.run("import fastai.collab, torch.distributed")
            _wait_until_idle(kernel)
            name = "nbdist"
        found: dict[str, float] = kernel.value(f"measure_launch({name}, 2)")
        return found

    names = ["import", "after warm()", *CONTESTANTS]
    run.sweep({"inside": "first_inside", "returned": "first"}, names, turn, 5, 45.0, fresh=True)


def _wait_until_idle(kernel: Kernel, seconds: float = 60.0) -> None:
    """Wait until the kernel and all below it have used no processor time for a second."""
    deadline, used = time.monotonic() + seconds, -1.0
    while time.monotonic() < deadline:
        before, used = used, sum(sum(p.cpu_times()[:2]) for p in kernel.processes())
        if used - before < 0.02:
            return
        time.sleep(1.0)


def _imported(run: Run, name: str) -> Kernel:
    """The contestant's kernel, in which torch and fastai are imported."""
    kernel = run.kernel(name)
    kernel.run("import fastai.collab, torch.distributed")
    return kernel


def warm(run: Run) -> None:
    for name in NOTEBOOK:  # whatever is kept warm is warm afterwards
        if name in ("nbdist", "floor", "fabric", "notebook_launcher"):
            _imported(run, name).run(f"measure_launch({name}, 2)")
    for ranks, budget in ((2, 20.0), (8, 40.0), (32, 60.0)):
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
            lambda name, ranks=ranks: _imported(run, name).value(f"measure_launch({name}, {ranks})", 180),  # type: ignore[misc]
            15 if ranks < 32 else 7,
            budget,
        )


def memory(run: Run) -> None:
    run.sweep(
        {"private": "private", "shared": "shared"},
        list(CONTESTANTS),
        lambda name: _imported(run, name).value(f"measure_memory({name}, 2)"),
        3,
        10.0,
    )


def frame(run: Run) -> None:
    size = 50 if run.quick else 500
    for ranks in (2, 8):

        def turn(name: str, ranks: int = ranks) -> dict[str, float]:
            kernel = run.kernel(name)
            if name == "copy":
                found: dict[str, float] = kernel.value(f"measure_copy({size})")
                return found
            _imported(run, name).run(f"frame = make_frame({size})")
            found = kernel.value(f"measure_frame({name}, {ranks}, frame)", 180)
            kernel.run("del frame")
            return found

        rows = {"inside": f"frame_{ranks}_inside", "returned": f"frame_{ranks}"}
        run.sweep(rows, ["copy", *NOTEBOOK], turn, 7, 45.0)
        run.sweep(
            {"held": f"held_{ranks}", "peak": f"peak_{ranks}"},
            NOTEBOOK,
            lambda name, ranks=ranks: _growth(_imported(run, name), name, ranks, size),  # type: ignore[misc]
            3,
            30.0,
        )
        run.absent([*rows.values(), f"held_{ranks}", f"peak_{ranks}"], ["torchrun"], "a script has no notebook's frame")
        run.absent([f"held_{ranks}", f"peak_{ranks}"], ["copy"], "–")
    run.drop()


def _growth(kernel: Kernel, name: str, ranks: int, size: int) -> dict[str, float]:
    """By how much all processes grow with the frame's ranks, beside what they hold with a tiny frame."""
    kernel.run(f"frame, tiny = make_frame({size}), make_frame(0.001)")
    held, peak = {}, {}
    for which in ("tiny", "frame"):
        with Peak() as watch:
            call = f"measure_held({name}, {ranks}, {which}, '{kernel.mark}')"
            held[which] = kernel.value(call, 180)["held"]
        peak[which] = watch.bytes
    kernel.run("del frame, tiny")
    return {"held": held["frame"] - held["tiny"], "peak": peak["frame"] - peak["tiny"]}


class Peak:
    """The most by which the machine's available memory went down meanwhile, looked at every 5 ms."""

    def __enter__(self) -> Peak:
        self._before = self._least = psutil.virtual_memory().available
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._least = min(self._least, psutil.virtual_memory().available)

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = self._before - self._least


def tensor(run: Run) -> None:
    size = 30 if run.quick else 300

    def turn(name: str) -> dict[str, float]:
        if name == "clone":
            found: dict[str, float] = run.kernel(name).value(f"measure_clone({size})")
        else:
            found = _imported(run, name).value(f"measure_tensor({name}, {size})", 90)
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
        run.kernel(name).run(f"stay = live_{name}(2); call = stay.__enter__()")
    again = {"first": "resend_first", "again": "resend", "seen": "seen"}
    run.sweep(
        {"latency": "latency"}, names, lambda n: {"latency": run.kernel(n).value("measure_latency(call, 50)")}, 8, 60
    )
    run.sweep(again, names, lambda n: run.kernel(n).value(f"measure_again(call, {size})", 180), 5, 60)
    for name in [name for name in names if name in run.kernels]:
        run.kernel(name).run("stay.__exit__(None, None, None)")
    others = [name for name in CONTESTANTS if name not in names]
    run.absent(["latency", *again.values()], others, "no ranks that stay")
    run.drop()


def training(run: Run) -> None:
    size = "100, 200, 4000, 1" if run.quick else "943, 1682, 100_000, 2"
    run.sweep(
        {"rate": "rate", "loss": "loss"},
        list(CONTESTANTS),
        lambda name: _imported(run, name).value(f"measure_training({name}, {size})", 180),
        9,
        150.0,
    )
    run.drop()


ROWS = {f.__name__: f for f in (first, warm, memory, frame, tensor, live, training)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data, two turns each: to see that it works")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="some of the rows")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    run = Run(arguments.quick)
    try:
        for name in arguments.only:
            print(f"{name}:", flush=True)
            ROWS[name](run)
    finally:
        run.drop()
    report.write(arguments.output, run.values, run.reasons, CONTESTANTS, arguments.quick)


if __name__ == "__main__":
    main()

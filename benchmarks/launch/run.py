"""A run of the benchmark: the contestants' kernels, and the contestants taking turns in them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.notebook import CellError, Kernel

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
#: Who keeps something between launches (a fork server, the kernel's own imports): the first is not like the next.
WARM_UP = ("nbdist", "floor", "fabric", "notebook_launcher")


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
                    kernel.run(f"from benchmarks.launch.{module} import *")
                else:
                    kernel.run((ROOT / "benchmarks" / "launch" / f"{module}.py").read_text())
        return self.kernels[name]

    def prepared(self, name: str) -> Kernel:
        """The same, with torch and fastai imported as at the top of a notebook, and one launch done."""
        if name not in self.kernels and name in CONTESTANTS:
            self.kernel(name).run("import fastai.collab, torch.distributed")
            if name in WARM_UP:
                self.kernels[name].run(f"measure_launch({name}, 2)")
        return self.kernel(name)

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
        """Run the contestants in turns, in another order each time, so that what disturbs one disturbs all.

        Args:
            rows: The rows this fills, by the number of a turn that goes there.
            names: Who takes part.
            turn: What a contestant does in its turn, and the numbers that it gives.
            repeats: How many turns each gets.
            budget: A contestant that has taken this number of seconds gets no further turn.
            fresh: Each turn is in a fresh kernel.
        """
        spent = dict.fromkeys(names, 0.0)
        active = list(names)
        for _ in range(min(repeats, 2) if self.quick else repeats):
            for name in random.sample(active, len(active)):
                begin = time.monotonic()
                try:
                    if not fresh:
                        self.prepared(name)
                        begin = time.monotonic()
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


class Peak:
    """The most by which the memory of all processes grew meanwhile, looked at every 5 ms.

    Not the memory that is left: a hypervisor takes free pages away for moments, a hundred megabytes at a time.
    """

    def __enter__(self) -> Peak:
        self._before = self._most = _used()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, _used())

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = self._most - self._before


def _used() -> int:
    """Bytes of the machine's memory that processes have: private, shared and in page tables, each page counted once."""
    sizes = {name: int(size) for name, size, *_ in map(str.split, Path("/proc/meminfo").read_text().splitlines())}
    return 1024 * (sizes["AnonPages:"] + sizes["Shmem:"] + sizes["PageTables:"])

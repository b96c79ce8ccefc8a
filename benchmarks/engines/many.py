"""CPU time of the notebook's side for the output of up to 10,000 ranks: `python -m benchmarks.engines.many`.

The kernel and Ray's driver process run as they are; nodes and ranks are imitated (`imitated.py`), so that the number of
ranks is not bounded by this machine. Its table is a part of `results/scale.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from benchmarks.engines.imitated import A_NODE, LINES, PRINTS, WIDTH
from benchmarks.machine import conditions, save_section
from nbdist import RayOptions, Session
from nbdist.engines.ray.kernel import driver_process
from nbdist.kernel.cell.cell import Cell
from nbdist.kernel.session import executor_of

#: Ranks of each measurement.
RANKS = (80, 1_000, 10_000)
#: The largest CPU time of the kernel for the output of 10,000 ranks, in seconds.
BAR = 2.0


class Shown:
    """A notebook's cell that takes what it is sent."""

    def __init__(self) -> None:
        self.characters, self.last = 0, ""

    def text(self, text: str, kind: int) -> None:
        self.characters += len(text)

    def message(self, name: str, content: dict[str, dict[str, str]]) -> None:
        self.last = content["data"]["text/plain"]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        page = {"text": lambda _, *what: self.text(*what), "message": lambda _, *what: self.message(*what)}
        with mock.patch.multiple(Cell, in_notebook=True, **page):
            yield


def noop() -> None:
    pass


def driver_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process: the system counts nanoseconds here, and hundredths elsewhere."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measure(ranks: int, turns: int, folder: str) -> dict[str, list[float]]:
    """Return CPU seconds of a no-op call, and of a call in which each rank prints."""
    flag = Path(folder, "prints")
    os.environ[PRINTS] = str(flag)
    found: dict[str, list[float]] = {}
    start = driver_process.interpreter.start

    def imitated(module: str, *arguments: str, **options: object) -> object:
        return start("benchmarks.engines.imitated", *arguments, **options)  # type: ignore[arg-type]

    with mock.patch.object(driver_process.interpreter, "start", imitated):
        session = Session(ranks, engine=RayOptions(address="imitated", linger=0.0))
        with session:
            session.run(noop)
            group = executor_of(session).group
            assert group is not None
            pid = group.ranks.driver.process.pid  # type: ignore[attr-defined]
            for _ in range(turns):
                for name, prints in (("call", False), ("output", True)):
                    flag.touch() if prints else flag.unlink(missing_ok=True)
                    cell = Shown()
                    before = time.process_time(), driver_seconds(pid), time.perf_counter()
                    with cell():
                        session.call(noop, output="all")
                    after = time.process_time(), driver_seconds(pid), time.perf_counter()
                    for which, begin, end in zip(("kernel", "driver", "wall"), before, after, strict=True):
                        found.setdefault(f"{name} {which}", []).append(end - begin)
                assert f"... {ranks * LINES:,} lines; these are the last 100" in cell.last, cell.last.partition("\n")[0]
    return found


def report(rows: dict[int, dict[str, list[float]]], turns: int) -> list[str]:
    """Return the table."""

    def cell(found: dict[str, list[float]], name: str) -> str:
        own = found[name]
        return f"{statistics.median(own):.3f} ({min(own):.3f} to {max(own):.3f})"

    lines = [
        f"CPU seconds of the notebook's side for one call: the median of {turns} calls (the least, the most). In the "
        f"calls with output, each rank prints {LINES} lines of {WIDTH} characters, and a notebook's cell shows them "
        f'(`output="all"`). Kernel and driver run as they are. Nodes of {A_NODE} ranks are imitated: the code of their '
        "agents is real, ranks run nothing, and calls of Ray go through one socket, so what Ray itself needs in the "
        "driver is not in it.",
        "",
        "| ranks | nodes | no-op call: kernel | driver | output: kernel | driver |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    names = ("call kernel", "call driver", "output kernel", "output driver")
    for ranks, found in rows.items():
        lines.append(f"| {ranks:,} | {-(-ranks // A_NODE):,} | {' | '.join(cell(found, name) for name in names)} |")
    return [*lines, "", f"The kernel's bar for the output of 10,000 ranks: {BAR:g} s.", "", *conditions()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=RANKS[-1], help="the largest number of ranks")
    parser.add_argument("--turns", type=int, default=5, help="calls of each kind, which take turns")
    parser.add_argument("--print", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {ranks: measure(ranks, arguments.turns, folder) for ranks in RANKS if ranks <= arguments.most}
    save_section("scale", "The output of 10,000 ranks", report(rows, arguments.turns), keep=not arguments.print)


if __name__ == "__main__":
    main()

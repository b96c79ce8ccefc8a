"""Growth of launch, data and output with ranks and nodes: `python -m benchmarks.engines.scale`.

Nodes are Ray nodes of this one machine, so what nodes would do at the same time they do one after the other here.
What the notebook's side does by itself (the kernel and its driver) is the same everywhere: its CPU time is measured
apart, and what it grows to with 10,000 ranks follows from that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import numpy as np
import psutil
from calls import boom, on, sums
from conftest import poll, ranks_of, start_cluster

from benchmarks import ROOT
from benchmarks.engines.ranks import HEADING
from benchmarks.machine import conditions, save
from nbdist import RayOptions, Session
from nbdist.engines.ray.kernel import driver_process as process
from nbdist.kernel.cell.cell import Cell
from nbdist.kernel.session import executor_of

#: Ranks and nodes of each measurement.
SHAPES = [(8, 1), (8, 2), (8, 4), (8, 8), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (256, 8)]
#: What each rank prints in the measurement of output: lines, characters of each.
LINES, WIDTH = 500, 80
DATA = 100_000_000
#: No-op calls that are measured together: the system counts the driver's CPU time in hundredths of a second.
CALLS = 20
#: Ranks of a node in the model.
A_NODE = 8


RESULTS = ROOT / "benchmarks" / "results" / "scale.json"


class Watch:
    """Wall time, and CPU time of the kernel and of its driver, of a block."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.wall = self.kernel = self.driver = 0.0

    def _now(self) -> tuple[float, float, float]:
        group = executor_of(self._session).group
        driver: Any = None if group is None else group.ranks.driver.process.pid  # type: ignore[attr-defined]
        return time.perf_counter(), time.process_time(), 0.0 if driver is None else _cpu(driver)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        begin = self._now()
        yield
        self.wall, self.kernel, self.driver = (b - a for a, b in zip(begin, self._now(), strict=True))


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def page() -> Iterator[None]:
    """A notebook's cell, which shows the first lines, the last ones and a number, in place of a terminal."""
    with mock.patch.multiple(Cell, in_notebook=True, text=lambda *_: None, message=lambda *_: None):
        yield


def noop() -> None:
    pass


def chatter() -> None:
    for _ in range(LINES):
        print("x" * (WIDTH - 1))


def measure(address: str, ranks: int, nodes: int) -> dict[str, float]:
    """Measure one shape, in an idle cluster: seconds, CPU seconds."""
    data = np.random.default_rng(ranks).random(DATA // 8)

    def touches() -> float:
        return float(data[:: 1 << 12].sum())

    found: dict[str, float] = {"ranks": ranks, "nodes": nodes}
    options = RayOptions(address=address, cpus=0.25, placement="spread", resources={f"shape{nodes}": 0.001}, wait=60.0)
    with Session(ranks, engine=options) as session:
        session.run(noop)  # room and warm processes: what a first call costs, benchmarks/engines/cluster.py says
    before = len(os.listdir("/proc/self/fd"))
    with Session(ranks, engine=options) as session:
        begin = time.perf_counter()
        executor_of(session).ready(Cell())
        found["fork"] = time.perf_counter() - begin
        session.run(noop)
        found["launch"] = time.perf_counter() - begin
        found["descriptors"] = len(os.listdir("/proc/self/fd")) - before
        counts = executor_of(session).group.ranks.driver.counts  # type: ignore[union-attr]
        assert len(counts) == nodes, f"{counts} instead of {nodes} nodes"
        for name, call in (("call", noop), ("data", touches), ("output", chatter)):
            times = CALLS if name == "call" else 1
            watch = Watch(session)
            with watch(), page():
                for _ in range(times):
                    session.call(call, output="all")
            watch.wall, watch.kernel, watch.driver = (one / times for one in (watch.wall, watch.kernel, watch.driver))
            if name == "output":
                assert session.logs(ranks - 1).count("x" * (WIDTH - 1)) == LINES
            found |= {name: watch.wall, f"{name} kernel": watch.kernel, f"{name} driver": watch.driver}
        begin = time.perf_counter()
        with contextlib.suppress(ValueError):
            session.run(on, 1, boom, sums)
        found["failure"] = time.perf_counter() - begin
        waiting = session.submit(on, 1, lambda: time.sleep(600), sums)
        assert poll(lambda: session.stacks().count("all_reduce at") == ranks - 1, 60), session.stacks()
        begin = time.perf_counter()
        session.stacks()
        found["stacks"] = time.perf_counter() - begin
        waiting.cancel()
        assert poll(waiting.done, 60)
        begin = time.perf_counter()
    found["close"] = time.perf_counter() - begin
    assert poll(lambda: not ranks_of(), 60), "nothing is left"
    process.release()
    return found


def model(rows: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """Base, per rank and per node, fitted by least squares and not below zero."""
    from scipy.optimize import nnls

    design = np.array([[1.0, row["ranks"], row["nodes"]] for row in rows])
    base, rank, node = nnls(design, np.array([row[name] for row in rows]))[0]
    return float(base), float(rank), float(node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=256, help="the largest number of ranks")
    parser.add_argument("--report", action="store_true", help="write the tables again from what was measured last")
    arguments = parser.parse_args()
    if not arguments.report:
        rows = measured(arguments.most)
        RESULTS.write_text(
            json.dumps({"rows": rows, "conditions": [*conditions(), f"- Ray {version('ray')}"]}, indent=1)
        )
    kept = json.loads(RESULTS.read_text())
    _, heading, ranks_here = RESULTS.with_suffix(".md").read_text().partition(HEADING)
    save("scale", [*report(kept["rows"]), "", *kept["conditions"], "", heading + ranks_here.rstrip()])
    if not arguments.report:
        # As a script of its own: ranks would import the modules next to its functions, if that were a module.
        subprocess.run([sys.executable, "-m", "benchmarks.engines.ranks"], check=True)


def measured(most: int) -> list[dict[str, float]]:
    """All shapes, on a cluster of eight nodes of this machine."""
    os.environ["PYTHONPATH"] = str(ROOT)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        # Nodes with a mark of their own for each shape: Ray would use more of them than are wanted.
        marks = {number: {f"shape{n}": 1.0 for n in (1, 2, 4, 8) if number < n} for number in range(8)}
        cluster = start_cluster(folder, num_cpus=32, resources=marks[0], second={"num_cpus": 32, "resources": marks[1]})
        for number in range(2, 8):
            cluster.add_node(num_cpus=32, resources=marks[number], object_store_memory=100 << 20, temp_dir=folder)
        try:
            for ranks, nodes in [shape for shape in SHAPES if shape[0] <= most]:
                rows.append(measure(cluster.address, ranks, nodes))
                print({name: round(value, 4) for name, value in rows[-1].items()}, file=sys.stderr, flush=True)
        finally:
            cluster.shutdown()
    return rows


def grown(rows: list[dict[str, float]], name: str) -> float:
    """Return a figure's value with 10,000 ranks."""
    base, rank, node = model(rows, name)
    return base + 10_000 * rank + 10_000 // A_NODE * node


def report(rows: list[dict[str, float]]) -> list[str]:
    """The measured table, and the modelled one."""
    lines = [
        "# How it grows",
        "",
        "Measured on this one machine, which is all nodes and all ranks at once; nothing is trained.",
        "",
        "| ranks | nodes | fork and connect | launch: the process group is up | a no-op call | 100 MB to all | "
        f"{LINES} lines of {WIDTH} characters from each rank | a failure | all stacks | close "
        "| open files of the kernel |",
        "|---:|" + "---:|" * 10,
    ]
    for row in rows:
        rate = row["ranks"] * LINES / row["output"] / 1000
        lines.append(
            f"| {row['ranks']:.0f} | {row['nodes']:.0f} | {row['fork']:.2f} s | {row['launch']:.2f} s "
            f"| {1000 * row['call']:.0f} ms | {row['data']:.2f} s | {row['output']:.2f} s, {rate:.0f} k lines/s "
            f"| {row['failure']:.2f} s | {row['stacks']:.2f} s | {row['close']:.2f} s | {row['descriptors']:.0f} |"
        )
    lines += [
        "",
        "What the notebook's side spends of it, in CPU time of kernel and driver together, and what that becomes with "
        f"10,000 ranks on {10_000 // A_NODE} nodes:",
        "",
        "| | fixed | each rank | each node | 10,000 ranks | of these the kernel's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    totals = {}
    for name, title in (("call", "a no-op call"), ("data", "100 MB to all"), ("output", f"{LINES} lines each")):
        summed = [row | {"side": row[f"{name} kernel"] + row[f"{name} driver"]} for row in rows]
        base, rank, node = model(summed, "side")
        totals[title] = grown(summed, "side")
        lines.append(
            f"| {title} | {1000 * base:.1f} ms | {1000 * rank:.3f} ms | {1000 * node:.2f} ms | {totals[title]:.1f} s "
            f"| {grown(rows, f'{name} kernel'):.1f} s |"
        )
    files = grown(rows, "descriptors")
    worst = sorted(totals, key=lambda title: -totals[title])
    return [
        *lines,
        "",
        f"The kernel has {files:.0f} open files for 10,000 ranks. By these figures, what breaks first of the "
        f"notebook's side: {'; then '.join(f'{title} ({totals[title]:.1f} s)' for title in worst)}. Not in them, since "
        "nodes of one machine cannot show it: what nodes do at the same time, and gloo's collectives over a network.",
    ]


if __name__ == "__main__":
    main()

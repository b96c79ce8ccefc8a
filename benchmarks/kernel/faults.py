"""Time until each row of the fault table is an exception in the cell, and what it leaves behind."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from conftest import Kernel, poll, ranks_of, shared_memory_names
from faults import FAULTS, PRELUDE, Fault

from benchmarks.machine import conditions, save

#: Seconds from failure to exception, median, for each row that does not itself wait.
TARGET = 1.0


@dataclass
class Row:
    """Observations of one fault, run after run; `left` is the most that any run left behind."""

    fault: Fault
    seconds: list[float] = field(default_factory=list)
    processes: int = 0
    descriptors: int = 0
    segments: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def reached(self) -> bool:
        in_time = self.median is None or self.fault.waits > 0 or self.median < TARGET
        return in_time and not (self.processes or self.descriptors or self.segments or self.problems)

    def line(self) -> str:
        if self.median is None:
            time_taken = "no exception" if self.fault.error is None else "not measured"
        else:
            time_taken = f"{self.median:.3f} s" + (f" (waits {self.fault.waits:g} s)" if self.fault.waits else "")
        left = f"{self.processes} / {self.descriptors} / {self.segments}"
        return f"| {self.fault.name} | {time_taken} | {left} | {'; '.join(self.problems) or 'yes'} |"


def segments() -> set[str]:
    """Shared memory by name; semaphores are left out, which other programs may be making meanwhile."""
    return {name for name in shared_memory_names() if not name.startswith("sem.")}


def run(kernel: Kernel, row: Row) -> None:
    """Run a fault once, and look at what it leaves."""
    process = psutil.Process(kernel.pid)
    fds, names = process.num_fds(), segments()
    mark = kernel.cwd / "failed_at"
    mark.unlink(missing_ok=True)
    result = kernel.run(row.fault.code)
    now = time.time()
    if row.fault.error is not None and mark.exists():
        row.seconds.append(now - float(mark.read_text()))
    if result.error != row.fault.error:
        row.problems.append(f"raised {result.error}")
    seen = result.plain_traceback + result.message
    row.problems += [f"does not say {part!r}" for part in row.fault.shows if part not in seen]
    poll(lambda: not ranks_of(kernel.pid) and process.num_fds() <= fds and not segments() - names, 5)
    row.processes = max(row.processes, len(ranks_of(kernel.pid)))
    row.descriptors = max(row.descriptors, process.num_fds() - fds)
    row.segments = max(row.segments, len(segments() - names))
    if kernel.run("print(in_ddp(2, sums))").text != "2.0\n":
        row.problems.append("the next call fails")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", type=int, default=3, help="how often each row is run")
    options = parser.parse_args()
    rows = [Row(fault) for fault in FAULTS]
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.ok(PRELUDE)
            kernel.ok("assert in_ddp(2, sums) == 2.0")
            for turn in range(options.k):
                for row in rows:
                    print(f"\r{turn + 1}/{options.k}: {row.fault.name:60}", end="", file=sys.stderr, flush=True)
                    run(kernel, row)
        finally:
            kernel.close()
            print(file=sys.stderr)
    prompt = [row.median for row in rows if row.median is not None and not row.fault.waits]
    good = sum(row.reached for row in rows)
    verdict = (
        "reached" if good == len(rows) else "**missed**: " + ", ".join(r.fault.name for r in rows if not r.reached)
    )
    save(
        "faults",
        [
            "# From failure to exception",
            "",
            f"Each row of `tests/faults.py`, {options.k} times in one real kernel: median time from the failure in the "
            "rank to the end of the cell; processes, descriptors and shared-memory names left (the most of any run); "
            "whether the exception was the right one and the next call worked.",
            "",
            "| fault | time | left | right |",
            "|---|---:|---:|---|",
            *(row.line() for row in rows),
            "",
            f"Rows that do not wait by nature: median {statistics.median(prompt):.3f} s, slowest {max(prompt):.3f} s.",
            f"Target: every one of them under {TARGET:g} s, nothing left, the next call works. "
            f"{good} of {len(rows)} rows: {verdict}.",
            "",
            *conditions(),
        ],
    )


if __name__ == "__main__":
    main()

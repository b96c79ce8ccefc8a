"""Many ranks on one machine: launched, called, failed, looked at and closed: `python -m benchmarks.engines.ranks`.

Its table is a part of `results/scale.md`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from calls import boom, on, sums
from conftest import poll

from benchmarks import ROOT
from benchmarks.machine import conditions
from nbdist import Session

COUNTS = (2, 32, 128)
#: Each measurement is the best of this number.
TURNS = 3
HEADING = "## Many ranks on one machine"
ROWS = {
    "launch": "launch: the process group is up, and a first call is done",
    "call": "a no-op call",
    "sums": "`all_reduce` of one number",
    "failure": "a `ValueError` in one rank while the others wait: until it is in the cell",
    "again": "the next call, in a new process group of the same processes",
    "stacks": "`session.stacks()` while all wait for one rank",
    "status": "`session.status()` for the first time, and",
    "status again": "from then on",
    "close": "`session.close()`: all processes are gone",
}


def noop() -> None:
    pass


def seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def fail(session: Session) -> None:
    try:
        session.run(on, 1, boom, sums)
    except ValueError:
        return
    raise AssertionError("rank 1 raises")


def measure(count: int) -> dict[str, float]:
    """Return the seconds of everything with `count` ranks."""
    session = Session(count)
    found = {"launch": seconds(lambda: session.run(noop)), "call": seconds(lambda: session.run(noop))}
    assert session.run(sums) == count
    found["sums"] = seconds(lambda: session.run(sums))
    pids = session.run_all(os.getpid)
    found["failure"] = seconds(lambda: fail(session))
    found["again"] = seconds(lambda: session.run(sums))
    assert session.run_all(os.getpid) == pids, "the ranks are the same after a failure"
    waiting = session.submit(on, 1, lambda: time.sleep(600), sums)
    assert poll(lambda: session.stacks().count("all_reduce at") == count - 1, 60), session.stacks()
    found["stacks"] = seconds(session.stacks)
    found["status"] = seconds(lambda: str(session.status()))
    found["status again"] = seconds(lambda: str(session.status()))
    waiting.cancel()
    assert poll(waiting.done, 60)
    session.run(noop)
    found["close"] = seconds(session.close)
    return found


def section() -> list[str]:
    """The table, with what it was measured on."""
    with Session(1) as warm:
        warm.run(noop)
    best: dict[int, dict[str, float]] = {}
    for _ in range(TURNS):
        for count in COUNTS:
            found = measure(count)
            print(count, {name: round(value, 3) for name, value in found.items()}, file=sys.stderr, flush=True)
            best[count] = {name: min(value, best.get(count, found)[name]) for name, value in found.items()}
    lines = [
        HEADING,
        "",
        f"Ranks of this machine alone, many more than it has cores; seconds, the best of {TURNS}. Connecting grows "
        "with the square of the ranks, since gloo connects each with every other: launch, the call after a failure.",
        "",
        "| | " + " | ".join(f"{count} ranks" for count in COUNTS) + " |",
        "|---|" + "---:|" * len(COUNTS),
    ]
    for name, title in ROWS.items():
        lines.append(f"| {title} | " + " | ".join(f"{best[count][name]:.3f}" for count in COUNTS) + " |")
    return [*lines, "", *conditions()]


def main() -> None:
    """Measure, and put the table in the place of the one before."""
    file = ROOT / "benchmarks" / "results" / "scale.md"
    before = file.read_text().partition(HEADING)[0].rstrip()
    text = "\n".join(section())
    print(text)
    file.write_text(f"{before}\n\n{text}\n")


if __name__ == "__main__":
    main()

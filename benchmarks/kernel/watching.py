"""Cost of the watch for hangs: launches, calls and a training, with and without the watch and its recorder of
collectives, in turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.launch.tasks import noop, train
from benchmarks.machine import conditions, save_section
from nbdist import Session, in_ddp
from nbdist.kernel.calls import group, waiting

#: Users, items, ratings and epochs of the training: as in notebook 01, with a third of the ratings.
TRAINING = 943, 1682, 30_000, 1


@contextlib.contextmanager
def watched(on: bool) -> Iterator[None]:
    """Watch the ranks that are started here, or have neither a recorder in ranks nor looks at them."""
    with contextlib.ExitStack() as stack:
        if not on:
            stack.enter_context(mock.patch.object(group, "Recording", lambda size: None))
            stack.enter_context(mock.patch.object(waiting, "Hangs", NoWatch))
        yield


class NoWatch:
    """A stand-in for the detector of hangs."""

    def __init__(self, *_: Any) -> None: ...

    def look(self, pending: Any) -> None: ...


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    fn(*args)
    return time.perf_counter() - begin


def rate() -> float:
    """Samples per second of a training on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        in_ddp.options(output="none")(2, train, folder, *TRAINING)
        return float(json.loads(Path(folder, "0.json").read_text())["rate"])


def measured(launches: int, calls: int, trainings: int) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of launches and calls, and samples per second, without and with the watch."""
    names = ("warm launch of 2 ranks, called, closed, ms", "no-op call, ms", "training, samples per second")
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}

    def turns(count: int) -> Iterator[bool]:
        for turn in range(2 * count):
            yield (turn + turn // 2) % 2 == 1  # off, on, on, off: neither is always the first of a pair

    in_ddp(2, noop)
    for on in turns(launches):
        with watched(on):
            found[names[0]][on].append(1000 * seconds(in_ddp, 2, noop))
    with contextlib.ExitStack() as stack:
        sessions = []
        for on in (False, True):
            with watched(on):
                sessions.append(stack.enter_context(Session(2, devices="cpu", threads=1)))
                sessions[-1].run(noop)
        for on in turns(calls):
            with watched(on):
                found[names[1]][on].append(1000 * seconds(sessions[on].run, noop))
    for on in turns(trainings):
        with watched(on):
            found[names[2]][on].append(rate())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=40)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--trainings", type=int, default=8)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    rows = []
    for name, pair in measured(options.launches, options.calls, options.trainings).items():
        if pair[0]:
            middle = [statistics.quantiles(one, n=4) for one in pair]
            off, on = (f"{low:.4g} | {median:.4g} | {high:.4g}" for low, median, high in middle)
            rows.append(f"| {name} | {off} | {on} | {middle[1][1] / middle[0][1]:.3f} |")
    lines = [
        "Ranks that are watched compared with ranks that are not, whose collectives are not recorded either; in turns "
        "in one process: medians, with their lower and upper quartiles. A difference within the quartiles is level.",
        "",
        "| | off: lower | median | upper | on: lower | median | upper | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
    ]
    save_section("hangs", "Cost of the watch", [*lines, "", *conditions(("torch",))], keep=not options.print)


if __name__ == "__main__":
    main()

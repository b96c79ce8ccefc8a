"""Ten thousand reads of the stacks of ranks that are busy, in each way in which they can be: none may kill a rank."""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import conditions, save
from nbdist import Session
from nbdist.engines.local import LocalEngine
from nbdist.kernel.session import executor_of


def in_python_code() -> None:
    def deep(n: int) -> int:
        return n if n == 0 else deep(n - 1) + 1

    while True:
        deep(20)
        [x * x for x in range(50)]


def in_threads() -> None:
    def work() -> None:
        while True:
            threading.Thread(target=sum, args=(range(100),)).start()

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    in_python_code()


def in_c_code() -> None:
    """Hold the GIL until it is done."""
    while True:
        sum(itertools.repeat(1, 300_000_000))


def in_a_collective() -> None:
    total = torch.ones(1)
    while True:
        dist.all_reduce(total)


def read_busy(fn: Callable[[], Any], reads: int) -> tuple[int, int]:
    """Read the stacks of two ranks in `fn`: how often that was, and how many had something to say."""
    measured = 0
    with Session(2) as session:
        session.run(int)
        ranks = executor_of(session).group.ranks  # type: ignore[union-attr]

        ends: list[BaseException] = []

        def call() -> None:
            try:
                session.run(fn)
            except BaseException as exc:
                ends.append(exc)

        caller = threading.Thread(target=call)
        caller.start()
        try:
            for number in range(reads):
                measured += bool(ranks.stacks([number % 2])[number % 2])
                if ends:
                    raise SystemExit(f"{fn.__name__}: after {number + 1} reads: {ends[0]}")
        finally:
            for rank in range(2):
                ranks.signal(rank, signal.SIGKILL)
            caller.join()
    return reads, measured


def read_while_they_come_and_go(reads: int) -> tuple[int, int]:
    """The same of ranks that are being started and ended."""
    done = measured = 0
    while done < reads:
        ranks = LocalEngine().start(2)
        stop = time.monotonic() + 0.2
        closing = threading.Timer(0.1, lambda ranks=ranks: [channel.send(("close",)) for channel in ranks.channels])
        closing.start()
        while time.monotonic() < stop and done < reads:
            text = ranks.stacks([done % 2])[done % 2]
            measured += bool(text)
            done += 1
            if not text and closing.finished.is_set():  # it is gone
                break
            bad = [end for end in ranks.exits() if end.status not in (0, None)]
            if bad:
                raise SystemExit(f"a rank that came or went died after {done} reads: {bad}")
        closing.join()
        ranks.close(1.0)
    return done, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=10_000, help="in all")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    arguments = parser.parse_args()
    # Half of them where it is dangerous; of those that wait for C code each takes a second.
    half, few = arguments.reads // 2, max(1, arguments.reads // 200)
    rest = arguments.reads - half - few
    plan: list[tuple[str, Callable[[], tuple[int, int]]]] = [
        ("busy in Python code", lambda: read_busy(in_python_code, half)),
        ("in C code that holds the GIL", lambda: read_busy(in_c_code, few)),
        ("in collectives", lambda: read_busy(in_a_collective, rest // 3)),
        ("with threads that come and go", lambda: read_busy(in_threads, rest // 3)),
        ("being started and ended", lambda: read_while_they_come_and_go(rest - 2 * (rest // 3))),
    ]
    lines = ["| ranks | reads | with a stack | ranks killed | time of one |", "|---|---|---|---|---|"]
    for name, run in plan:
        begin = time.monotonic()
        reads, measured = run()
        each = (time.monotonic() - begin) / reads
        lines.append(f"| {name} | {reads} | {measured} | 0 | {1000 * each:.1f} ms |")
        print(lines[-1], flush=True)
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    save(f"stacks_{version}", [*lines, "", *conditions(("torch", "psutil"))], keep=not arguments.print)


if __name__ == "__main__":
    main()

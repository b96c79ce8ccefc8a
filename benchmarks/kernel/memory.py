"""Peak memory of a call, in the kernel and in a rank, by size of captured data and of the answer.

A script of its own for each row holds an array of that size, or has rank 0 make one. While the call runs, a thread
looks at the proportional set size (PSS) of the kernel and of both ranks every few milliseconds: what is shared counts
once in all. The table has the growth since the moment before the call.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks import machine

#: MB of captured data, MB of the answer.
ROWS = ((0, 0), (200, 0), (1000, 0), (0, 200), (0, 1000), (200, 200), (1000, 1000))

SCRIPT = """
import os
import sys
import threading
import time

import numpy as np
import psutil

from nbdist import Session

captured, answer = (int(size) * 1_000_000 // 8 for size in sys.argv[1:3])


def pss(process):
    return process.memory_full_info().pss


def call():
    total = held.sum()
    return np.ones(answer) if answer else total


with Session(2) as session:
    processes = [psutil.Process()] + [psutil.Process(pid) for pid in session.run_all(os.getpid)]
    held = np.ones(captured)
    session.run(len, np.ones(100_000))
    before = [pss(process) for process in processes]
    most, done = [0] * 3, threading.Event()

    def look():
        while not done.is_set():
            for number, process in enumerate(processes):
                most[number] = max(most[number], pss(process) - before[number])
            time.sleep(0.002)

    watcher = threading.Thread(target=look)
    watcher.start()
    value = session.run(call)
    time.sleep(0.1)
    done.set()
    watcher.join()
    after = pss(processes[0]) - before[0]
    print(*(round(size / 1e6) for size in (most[0], max(most[1:]), after)))
"""


def main() -> None:
    lines = [
        "# Memory of a call",
        "",
        "Two ranks; growth of the proportional set size, MB.",
        "",
        "| captured | answer | kernel, at most | a rank, at most | kernel, afterwards |",
        "|---:|---:|---:|---:|---:|",
    ]
    for captured, answer in ROWS:
        command = [sys.executable, "-c", SCRIPT, str(captured), str(answer)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        lines.append(f"| {captured} | {answer} | {' | '.join(found)} |")
    machine.save("memory", [*lines, "", *machine.conditions(("torch", "numpy"))])


if __name__ == "__main__":
    main()

"""Data to nodes over slow lines: `python -m benchmarks.engines.shaped`, as root, with iproute2 and OpenSSH's server.

Nodes are network namespaces of this machine, each an end of a line that `tc` limits in both directions; so is the
notebook, which starts Ray on them by ssh. What it takes to send data to each node by itself follows from the rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from machines import namespaces, ssh_options, why_not

import nbdist
from benchmarks import ROOT
from benchmarks.machine import conditions, save_section
from nbdist import Session

#: Megabits a second of each line, and bytes of the data.
RATE, DATA = 400, 100_000_000
NODES = (1, 2, 4, 8)
ROUNDS = 3
#: Seconds from the start of one node to the start of the next.
STAGGER = 10


def inside(folder: str, hosts: list[str]) -> None:
    """In the notebook's namespace: the seconds of each round, and the bytes that have left it, as JSON."""
    sent = Path("/sys/class/net/eth0/statistics/tx_bytes")
    about: dict[str, Any] = {"options": ssh_options(Path(folder), 22), "linger": 0.0, "wait": 300}
    # One after the other: on the cores that they share, Ray gives up nodes that take longer than 30 s to start.
    python = Path(folder) / "python"
    python.write_text(
        f'#!/bin/sh\nset -- $SSH_CONNECTION -- "$@"; host=${{3##*.}}\nwhile [ "$1" != -- ]; do shift; done; shift\n'
        f'sleep $((({STAGGER} * (host - 2))))\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    start = ["--object-store-memory=400000000", "--num-cpus=1"]
    found = []
    with (
        nbdist.cluster(hosts, placement="strict_spread", ray_start=start, python=str(python), **about),
        Session(len(hosts)) as session,
    ):
        session.run_all(len, [])
        for number in range(ROUNDS):
            data = np.random.default_rng(number).bytes(DATA)
            before, begin = int(sent.read_text()), time.perf_counter()
            assert session.run_all(len, data) == [DATA] * len(hosts)
            found.append((time.perf_counter() - begin, int(sent.read_text()) - before))
    print(json.dumps(found))


def measure(nodes: int) -> list[tuple[float, int]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces(Path(folder), nodes + 1, f"{RATE}mbit") as machines,
    ):
        notebook, *hosts = machines
        command = [sys.executable, "-m", "benchmarks.engines.shaped", "inside", folder, *hosts]
        done = subprocess.run(
            ["ip", "netns", "exec", machines[notebook], *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"{nodes} nodes: exit code {done.returncode}")
        return [tuple(one) for one in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    once = DATA * 8 / RATE / 1e6
    lines = [
        f"100 MB of captured data to a session with a rank on each node, over lines of {RATE} Mbit/s in each "
        f"direction: of {ROUNDS} rounds the median, and what has left the notebook's machine.",
        "",
        "| nodes | until all have it | has left the notebook | one after the other it would take |",
        "|---:|---:|---:|---:|",
    ]
    for nodes in NODES:
        seconds, sent = sorted(measure(nodes))[ROUNDS // 2]
        lines.append(f"| {nodes} | {seconds:.1f} s | {sent / 1e6:.0f} MB | {once * nodes:.1f} s |")
    save_section("scale", "Data over slow lines", [*lines, "", *conditions(), f"- Ray {version('ray')}"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(sys.argv[2], sys.argv[3:])
    else:
        main()

"""The Ray engine on two nodes of this machine, compared with Ray Train: `python -m benchmarks.engines.cluster`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from typing import Any

from conftest import start_cluster

from benchmarks import ROOT
from benchmarks.machine import conditions, save

#: What both run, and what it takes to be there: every rank in the function, and a collective done.
FUNCTION = """
import sys, time
import torch, torch.distributed as dist

def fn(config=None):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0
"""

NBDIST = """
from nbdist import RayOptions, Session, in_ddp, use
use(RayOptions(address=sys.argv[1], placement="strict_spread"))
begin = time.perf_counter()
in_ddp(2, fn)
first = time.perf_counter() - begin
begin = time.perf_counter()
in_ddp(2, fn)
second = time.perf_counter() - begin
"""

RAY_TRAIN = """
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
def fit():
    begin = time.perf_counter()
    TorchTrainer(
        fn,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=sys.argv[2]),
    ).fit()
    return time.perf_counter() - begin
first = fit()
second = fit()
"""

LIVE = """
import numpy as np
from nbdist import RayOptions, Session
from nbdist.kernel.session import executor_of
def noop():
    pass
with Session(2, engine=RayOptions(address=sys.argv[1], placement="strict_spread")) as session:
    session.run(noop)
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        session.run(noop)
        times.append(time.perf_counter() - begin)
data = np.random.default_rng(0).random(500_000_000 // 8)
def total():
    return float(data.sum())
with Session(8, engine=RayOptions(address=sys.argv[1], placement="spread", linger=0)) as session:
    session.run(noop)
    before = executor_of(session).group.ranks.received()
    begin = time.perf_counter()
    assert session.run_all(total) == [data.sum()] * 8
    first = time.perf_counter() - begin
    received = [now - then for now, then in zip(executor_of(session).group.ranks.received(), before)]
    begin = time.perf_counter()
    session.run_all(total)
    again = time.perf_counter() - begin
    unchanged = executor_of(session).group.ranks.received() == [sum(pair) for pair in zip(before, received)]
import json
print(json.dumps({"live": times, "received": received, "first": first, "again": again, "unchanged": unchanged}))
"""


def script(text: str, *arguments: str) -> Any:
    """Run a script of its own; the JSON that it prints last."""
    command = [sys.executable, "-c", FUNCTION + text, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def row(title: str, seconds: list[float]) -> str:
    cells = [f"{statistics.median(seconds):.2f} s", f"{min(seconds):.2f} – {max(seconds):.2f} s"]
    return f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    printed = "\nimport json\nprint(json.dumps([first, second]))"
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        cluster = start_cluster(folder, object_store_memory=300 << 20)
        try:
            for _ in range(repeats):
                theirs.append(script(RAY_TRAIN + printed, cluster.address, folder))
                ours.append(script(NBDIST + printed, cluster.address))
            live = script(LIVE, cluster.address)
        finally:
            cluster.shutdown()

    first_ours, second_ours = map(list, zip(*ours, strict=True))
    first_theirs, second_theirs = map(list, zip(*theirs, strict=True))
    call = 1000 * statistics.median(live["live"])
    slowest = 1000 * statistics.quantiles(live["live"], n=20)[-1]
    ratio = statistics.median(first_theirs) / statistics.median(first_ours)
    sent = ", ".join(f"{size / 1e6:.1f} MB" for size in live["received"])
    lines = [
        "# The Ray engine on two nodes",
        "",
        f"Two nodes of one Ray cluster, both on this machine; Ray was up. {repeats} fresh processes each, in turn.",
        "",
        "| 2 ranks, one a node, an all_reduce, until the call returns | median | range |",
        "|---|---:|---:|",
        row("nbdist: first `in_ddp`", first_ours),
        row("Ray Train: first `TorchTrainer.fit`", first_theirs),
        row("nbdist: second `in_ddp`", second_ours),
        row("Ray Train: second `TorchTrainer.fit`", second_theirs),
        "",
        f"- First call no slower than Ray Train: {ratio:.1f} × as fast: {_reached(ratio >= 1)}.",
        f"- A call in a live session, 2 ranks on 2 nodes: {call:.1f} ms (median of 300; 95 % below {slowest:.1f} ms). "
        f"Target: 10 ms: {_reached(call <= 10)}.",
        f"- 500 MB of captured data, 8 ranks on 2 nodes: the nodes received {sent}; until all ranks had summed them: "
        f"{live['first']:.2f} s; a second call with the same data: {live['again']:.2f} s, nothing sent: "
        f"{live['unchanged']}. Target: one transfer a node: "
        f"{_reached(all(abs(size - 5e8) < 1e6 for size in live['received']) and live['unchanged'])}.",
        "",
        *conditions(),
        f"- Ray {version('ray')}",
    ]
    save("cluster", lines)


def _reached(is_so: bool) -> str:
    return "reached" if is_so else "**missed**"


if __name__ == "__main__":
    main()

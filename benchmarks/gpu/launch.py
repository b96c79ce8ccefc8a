"""A call whose rank uses its GPU, compared with a bare fork of a process with torch that does."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from nbdist import Session, in_ddp, warm

from .notes import median, note, seconds

LIMIT = 60.0
NEEDS = ()
BAR = 1.5

#: A process that has imported torch and nothing else forks, and its child uses CUDA in one of several ways.
BARE = """
import os, statistics, sys, time
import torch
import torch.distributed as dist
device, ways = sys.argv[1], sys.argv[2:]
def use(way):
    if device != "cpu":
        torch.cuda.set_device(0)
    if "group" in way:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl" if "gloo" in way else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if "touch" in way:
        torch.ones(1, device=device).item()
    if "destroyed" in way:
        dist.destroy_process_group()
def turn(way):
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        use(way)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return time.perf_counter() - begin
for way in ways:
    turn(way)
    print(statistics.median(turn(way) for _ in range(7)))
"""
WAYS = {
    "touch": "a bare fork of a process with torch, CUDA used",
    "touch group gloo destroyed": "the same with gloo's and NCCL's group, which it destroys",
}


#: Functions as a cell defines them: they are of no module, which each rank would import.
CELL = """
import time
import torch
from nbdist import rank_device

def touch():
    return float(torch.ones(1, device=rank_device()).item())

def timed():
    begin = time.time()
    touch()
    return begin, time.time()
"""


def phases(options: Any, function: Callable[[], tuple[float, float]]) -> str:
    """Say where the time of a warm call goes: medians of calls of a function that returns when it began and ended."""
    before, inside, after = [], [], []
    for _ in range(7):
        called = time.time()
        begin, end = options(1, function)
        returned = time.time()
        before.append(begin - called)
        inside.append(end - begin)
        after.append(returned - end)
    names = ("until the function begins", "in it", "until its result is here")
    medians = (statistics.median(one) for one in (before, inside, after))
    return ", ".join(f"{value * 1000:.0f} ms {name}" for name, value in zip(names, medians, strict=True))


def run(device: str) -> None:
    cell: dict[str, Any] = {"__name__": "cell"}
    exec(CELL, cell)
    touch, timed = cell["touch"], cell["timed"]
    output = subprocess.check_output([sys.executable, "-c", BARE, device, *WAYS], text=True)
    took = [float(line) for line in output.split()]
    for what, one in zip(WAYS.values(), took, strict=True):
        note(what, f"{one * 1000:,.0f} ms")
    bare = took[0]
    options = in_ddp.options(devices=device)
    ours = median(lambda: seconds(lambda: options(1, touch)), 9)
    found = f"{ours * 1000:,.0f} ms, {ours / bare:.2f} × the bare fork"
    note("warm `in_ddp(1)`, CUDA used", found, met=ours / bare <= BAR, bar=f"at most {BAR} ×")
    note("where the time goes", phases(options, timed))
    idle = median(lambda: seconds(lambda: options(1, int)))
    note("warm `in_ddp(1)`, CUDA not used", f"{idle * 1000:,.0f} ms")
    cpu = median(lambda: seconds(lambda: in_ddp.options(devices="cpu")(1, int)))
    note("warm `in_ddp(1)` of a CPU rank", f"{cpu * 1000:,.0f} ms")
    with Session(1, devices=device) as session:
        session.run(touch)
        live = median(lambda: seconds(lambda: session.run(touch)), 20)
        note("a call in a live session, CUDA used", f"{live * 1000:,.2f} ms")
    if device != "cpu":
        warm(gpus=1)

        def later() -> float:
            time.sleep(2.0)  # the time between two cells, in which a rank creates its context and waits
            return seconds(lambda: options(1, touch))

        ready = median(later, 7)
        found = f"{ready * 1000:,.0f} ms, {ready / cpu:.2f} × a CPU rank"
        note("`in_ddp(1)` after `warm(gpus=1)`, CUDA used", found, met=ready / cpu <= BAR, bar=f"at most {BAR} ×")

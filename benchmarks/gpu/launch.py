"""A call whose rank uses its GPU, beside a bare fork of a process with torch that does."""

from __future__ import annotations

import subprocess
import sys

import torch

from nbdist import Session, in_ddp, rank_device

from .notes import attempt, median, note, seconds

LIMIT = 60.0
NEEDS = ()
BAR = 1.5

#: A process that has imported torch and nothing else forks, and its child initialises CUDA.
BARE = """
import os, statistics, sys, time
import torch
def turn():
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        torch.ones(1, device=sys.argv[1]).item()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return time.perf_counter() - begin
turn()
print(statistics.median(turn() for _ in range(5)))
"""


def touch() -> float:
    """In a rank: use its GPU."""
    return float(torch.ones(1, device=rank_device()).item())


def run(device: str) -> None:
    bare = float(subprocess.check_output([sys.executable, "-c", BARE, device], text=True))
    note("a bare fork of a process with torch, CUDA used", f"{bare * 1000:,.0f} ms")
    options = in_ddp.options(devices=device)
    ours = median(lambda: seconds(lambda: options(1, touch)))
    found = f"{ours * 1000:,.0f} ms, {ours / bare:.2f} × the bare fork"
    note("warm `in_ddp(1)`, CUDA used", found, met=ours / bare <= BAR, bar=f"at most {BAR} ×")
    idle = median(lambda: seconds(lambda: options(1, int)))
    note("warm `in_ddp(1)`, CUDA not used", f"{idle * 1000:,.0f} ms")
    if device == "cuda":
        with attempt("NCCL alone"):
            alone = median(lambda: seconds(lambda: in_ddp.options(devices=device, backend="nccl")(1, touch)))
            note("the same with NCCL alone, without gloo beside it", f"{alone * 1000:,.0f} ms")
    with Session(1, devices=device) as session:
        session.run(touch)
        live = median(lambda: seconds(lambda: session.run(touch)), 20)
        note("a call in a live session, CUDA used", f"{live * 1000:,.2f} ms")
        live = median(lambda: seconds(lambda: session.run(int)), 20)
        note("a call in a live session, CUDA not used", f"{live * 1000:,.2f} ms")

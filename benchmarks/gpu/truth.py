"""A rank with NCCL, called from a notebook that has used CUDA itself."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from nbdist import Session, in_ddp, rank_device

from .notes import attempt, note, seconds

LIMIT = 60.0
NEEDS = ()


def sums() -> float:
    """In a rank: how many ranks there are, by an all_reduce on their devices."""
    total = torch.ones(1, device=rank_device())
    dist.all_reduce(total)
    return total.item()


def everything() -> tuple[str, float, float, list[Any]]:
    """In a rank: the backend, sums on the device and on the CPU, and gathered objects."""
    host = torch.ones(1)
    dist.all_reduce(host)
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, "object")
    dist.barrier()
    return dist.get_backend(), sums(), host.item(), objects


def garbage() -> None:
    """In a rank: leave 1 GiB of its GPU in a circle of references, as a learner and its callbacks do."""

    class Learner:
        pass

    one: Any = Learner()
    one.me, one.big = one, torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def run(device: str) -> None:
    x = torch.arange(8.0, device=device)  # the notebook's own context

    with attempt("first call"):
        took = seconds(lambda: in_ddp.options(devices=device)(1, everything))
        note("the first call of a notebook that uses CUDA", f"{took:.2f} s")
    with attempt("one rank"), Session(1, devices=device) as session:
        backend, total, host, objects = session.run(everything)
        wanted = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        right = (backend, total, host, objects) == (wanted, 1.0, 1.0, ["object"])
        note("collectives of CUDA tensors, CPU tensors, objects", backend, met=right, bar=wanted)
        there, value = session.run(lambda: (x.device.type, (x * 2).sum().item()))
        note("a tensor of the notebook's GPU in the rank", there, met=(there, value) == (device, 56.0), bar=device)
        result = session.run(lambda: torch.ones(3, device=rank_device()))
        note("a result comes back on the CPU", result.device.type, met=result.device.type == "cpu", bar="cpu")
        pids = {session.run(os.getpid) for _ in range(2)}
        note("one process for all calls of a session", f"{len(pids)} processes", met=len(pids) == 1)
        cudnn = session.run(settings)
        note("cudnn.benchmark and allow_tf32 set in a call", cudnn, met=cudnn == (True, True))
    if device == "cuda":
        with attempt("memory"):
            memory()


def settings() -> tuple[bool, bool]:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32


def memory() -> None:
    with Session(1, devices="cuda") as session:
        for _ in range(3):
            session.run(garbage)
        kept = session.run(lambda: torch.cuda.memory_allocated() / 2**30)
        note("GiB kept after 3 calls that left 1 GiB in a circle each", f"{kept:.2f} GiB", met=kept < 0.1, bar="0")
        free = torch.cuda.mem_get_info(0)[0]
        session.empty_cache()
        back = (torch.cuda.mem_get_info(0)[0] - free) / 2**30
        note("given back by `empty_cache`", f"{back:.2f} GiB", met=back > 0.9)

        def out_of_bounds() -> float:
            table, ids = torch.ones(4, 2, device="cuda"), torch.tensor([9], device="cuda")
            return table.index_select(0, ids).sum().item()

        try:
            session.run(out_of_bounds)
        except RuntimeError as error:
            last = " ".join(str(error.__cause__).splitlines()[-2:])
            note("an assertion on the GPU", last, met="Assertion" in last)
        note("the next call after it", session.run(sums), met=session.run(sums) == 1.0)

        def late() -> None:
            torch.ones(4, 2, device="cuda").index_select(0, torch.tensor([9], device="cuda"))

        try:
            session.run(late)
            note("an assertion that nothing in the call waits for", "no exception", met=False, bar="raised in its call")
        except RuntimeError as error:
            note("an assertion that nothing in the call waits for", type(error).__name__, met=True)
        note("the next call after that", session.run(sums), met=session.run(sums) == 1.0)

"""Two NCCL ranks on one GPU, each with a host name of its own: what NCCL does, and what ends a wait in its kernels."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist import Session, rank_device

from .notes import attempt, note
from .truth import sums

LIMIT = 150.0
NEEDS = ()
SECONDS = 2.0
"""Seconds in which a failure in a NCCL kernel has to be over, in addition to the time of the call."""


def session_of(device: str, **options: Any) -> Session:
    """Two ranks: with NCCL on the first GPU, or on CPUs with gloo."""
    if device == "cpu":
        options.pop("env", None)
        return Session(2, devices="cpu", timeout=90, **options)
    backend = {"backend": "nccl", **options.pop("backend", {})}
    return Session(2, devices=["cuda:0", "cuda:0"], backend=backend, timeout=45, **options)


def collectives() -> list[Any]:
    device, rank, size = rank_device(), dist.get_rank(), dist.get_world_size()
    own = torch.full((1,), float(rank), device=device)
    total, last = own.clone(), own.clone()
    dist.all_reduce(total)
    dist.broadcast(last, size - 1)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own)
    mixed = torch.zeros(size, device=device)
    dist.all_to_all_single(mixed, own.repeat(size))
    sent = torch.full((1,), 7.0, device=device)
    dist.send(sent, 1) if rank == 0 else dist.recv(sent.zero_(), 0)
    return [total.item(), last.item(), [one.item() for one in gathered], mixed.tolist(), sent.item()]


WANTED = [1.0, 1.0, [0.0, 1.0], [0.0, 1.0], 7.0]


def train(shard: bool) -> tuple[float, float, float]:
    """In a rank: first and last loss, and the sum of the weights, which is alike on all ranks."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(16, 1).to(rank_device())
    if shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 16, device=rank_device())[dist.get_rank() :: 2]
    losses = []
    for _ in range(20):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    return losses[0], losses[-1], sum(one.sum().item() for one in weights)


def fail() -> None:
    sums()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        raise ValueError("boom")
    sums()


def hang() -> None:
    sums() if dist.get_rank() == 0 else time.sleep(600)


def late() -> float:
    sums()
    if dist.get_rank() == 1:
        time.sleep(9)
    return sums()


def out_of_bounds() -> None:
    sums()
    if dist.get_rank() == 1:
        torch.ones(4, 2, device="cuda").index_select(0, torch.tensor([9], device="cuda")).sum().item()
    sums()


def die() -> None:
    sums()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sums()


def after(
    session: Session, what: str, action: Callable[[], Any], raised: str, within: float, same: bool | None = True
) -> None:
    """Note what a call raises, in which time, and what is left of the session.

    Args:
        raised: The exception's type that is promised, or several with a bar between them.
        within: Seconds, those included that the call itself waits.
        same: Whether the ranks' processes have to be the same; None: not promised.
    """
    with attempt(what):
        pids, begin, found = session.run_all(os.getpid), time.perf_counter(), ""
        try:
            action()
        except BaseException as error:
            found = type(error).__name__
            text = str(error)[:300]
        else:
            text = ""
        took = time.perf_counter() - begin
        works = session.run(sums)
        stayed = session.run_all(os.getpid) == pids
        right = found in raised.split("|") and took <= within and works == 2.0 and (same is None or stayed == same)
        processes = "the same processes" if stayed else "new processes"
        promised = f"{raised} within {within:.0f} s" + ("" if same is None else ", state kept" if same else "")
        note(what, f"{found or 'nothing raised'} after {took:.1f} s, {processes}", met=right, bar=promised, text=text)


def pressed(session: Session) -> None:
    press = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    session.run(hang)


def run(device: str) -> None:
    with attempt("a session"), session_of(device) as session:
        backend = session.run(dist.get_backend)
        wanted = "gloo" if device == "cpu" else "nccl"
        note("the backend of two ranks on one GPU", backend, met=backend == wanted, bar=wanted)
        found = session.run_all(collectives)
        note("collectives", found[0], met=found == [WANTED, WANTED])
        for name, shard in (("DDP", False), ("FSDP2", True)):
            with attempt(name):
                ends = session.run_all(train, shard)
                right = all(last < first / 4 for first, last, _ in ends) and abs(ends[0][2] - ends[1][2]) < 1e-4
                note(f"{name}, 20 steps", [f"{first:.2f} → {last:.3f}" for first, last, _ in ends], met=right)
        waiting = "while the other waits in a NCCL kernel"
        after(session, f"a rank fails {waiting}", lambda: session.run(fail), "ValueError", 0.5 + SECONDS)
        after(session, f"a second failure {waiting}", lambda: session.run(fail), "ValueError", 0.5 + SECONDS)
        after(session, f"the stop button {waiting}", lambda: pressed(session), "KeyboardInterrupt", 1.5 + SECONDS)
        with attempt("killed"):
            try:
                session.run(die)
                note(f"a rank is killed {waiting}", "nothing raised", met=False)
            except Exception as error:
                note(f"a rank is killed {waiting}", f"{type(error).__name__}: {error}", met="SIGKILL" in str(error))
            session.restart()
            total = session.run(sums)
            note("the first call after `restart()`", total, met=total == 2.0)
    errors = "DistBackendError|RuntimeError|ValueError|DistError"
    for name, env in (("as nbdist sets it", {}), ("torch's own setting", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})):
        with attempt("a timeout"), session_of(device, backend={"timeout": 5}, env=env) as session:
            if device == "cuda":
                promised = errors if not env else f"{errors}|RankDied"
                what = f"a collective's timeout of 5 s, {name}"
                after(session, what, lambda: session.run(late), promised, 10 + SECONDS, None)
    for name, env in (("as nbdist sets it", {}), ("torch's own setting", {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"})):
        if device == "cuda":
            with attempt("an assertion"), session_of(device, env=env) as session:
                promised = "AcceleratorError|RuntimeError" if not env else "AcceleratorError|RuntimeError|RankDied"
                what = f"an assertion on the GPU with a live communicator, {name}"
                after(session, what, lambda: session.run(out_of_bounds), promised, 10 + SECONDS, None)

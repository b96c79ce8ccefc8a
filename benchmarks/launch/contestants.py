"""The contestants: functions `launch(ranks, fn, *args)` that run `fn` on all ranks and return rank 0's value.

Like `tasks.py`, this text is run as a cell where the contestant can send functions of cells.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

IMPORTS = "from fastai.collab import *"


def nbdist(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    from nbdist import in_ddp

    return in_ddp(ranks, fn, *args, imports=IMPORTS)


def floor(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """The standard library's fork server with the same modules, and the cheapest way to a process group."""
    import multiprocessing
    import pickle

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "fastai.collab", "benchmarks.launch.contestants"])
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        meeting_file = os.path.join(folder, "meeting")
        processes = [
            context.Process(
                target=floor_rank, args=(theirs if rank == 0 else None, rank, ranks, meeting_file, fn, args)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            value = pickle.loads(ours.recv_bytes())
        except EOFError:
            raise RuntimeError("rank 0 ended without an answer") from None
        for process in processes:
            process.join()
    return value


def floor_rank(answer: Any, rank: int, ranks: int, meeting_file: str, fn: Callable[..., Any], args: Any) -> None:
    import pickle

    from benchmarks.launch import tasks

    value = tasks.enter(rank, ranks, meeting_file, fn, *args)
    if answer is not None:
        answer.send_bytes(pickle.dumps(value, protocol=5))


def fabric(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    import fastai.collab  # noqa: F401 (in the notebook, which the ranks are forks of)
    from lightning_fabric import Fabric

    launcher = Fabric(accelerator="cpu", devices=ranks, strategy="ddp_notebook")
    return launcher.launch(lambda fabric, *args: fn(*args), *args)


def notebook_launcher(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    import fastai.collab  # noqa: F401
    from accelerate import notebook_launcher

    return notebook_launcher(fn, args, num_processes=ranks, use_port=free_port())


def spawn(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    import torch.multiprocessing

    from benchmarks.launch import tasks

    with tempfile.TemporaryDirectory() as folder:
        meeting_file = os.path.join(folder, "meeting")
        torch.multiprocessing.spawn(tasks.enter, (ranks, meeting_file, fn, *args), nprocs=ranks)


def torchrunx(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    from torchrunx import Launcher

    return Launcher(hostnames=["localhost"], workers_per_host=ranks, backend="gloo").run(fn, *args).rank(0)


def ipyparallel(ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    import ipyparallel as ipp

    from benchmarks.launch.tasks import enter

    with tempfile.TemporaryDirectory() as folder, ipp.Cluster(n=ranks, log_level=40) as client:
        view = client[:]
        view.use_cloudpickle().get()  # a cell's function brings the cell's other functions along
        view.scatter("rank", range(ranks), flatten=True, block=True)
        meeting_file = os.path.join(folder, "meeting")
        return view.apply_sync(enter, ipp.Reference("rank"), ranks, meeting_file, fn, *args)[0]


def torchrun(ranks: int, fn: Callable[..., Any], *args: Any) -> None:
    """Run `!torchrun ...` as in a cell, which gives it a terminal: fastai shows its bar there, as in a notebook."""
    import shlex

    from IPython import get_ipython

    shell: Any = get_ipython()
    shell.system(shlex.join(torchrun_command(ranks, fn, *args)))
    if shell.user_ns["_exit_code"]:
        raise RuntimeError(f"torchrun ended with {shell.user_ns['_exit_code']}")


def torchrun_piped(ranks: int, fn: Callable[..., Any], *args: Any) -> None:
    """The same without a terminal: nothing shows how far it is."""
    import subprocess

    result = subprocess.run(torchrun_command(ranks, fn, *args), capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr)


def torchrun_command(ranks: int, fn: Callable[..., Any], *args: Any) -> list[str]:
    import json
    import sys

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, "-m", "benchmarks.launch.script", fn.__name__, json.dumps(args)]


def free_port() -> str:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


# ------------------------------------------------------------------------- ranks that stay between calls, two of them


@contextmanager
def live_nbdist(ranks: int) -> Iterator[Callable[..., Any]]:
    from nbdist import Session

    with Session(ranks) as session:
        yield session.run


@contextmanager
def live_ipyparallel(ranks: int) -> Iterator[Callable[..., Any]]:
    import ipyparallel as ipp

    with ipp.Cluster(n=ranks, log_level=40) as client:
        view = client[:]
        yield lambda fn, *args: view.apply_sync(fn, *args)[0]

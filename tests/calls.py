"""Functions of ranks in the tests of calls, sessions and interrupts."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def sums() -> float:
    """Over all ranks, of a one from each."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def remember(value: int) -> list[int]:
    """The rank's pid, and every value that it has been given."""
    import __main__

    __main__.kept = [*getattr(__main__, "kept", []), value]
    return [os.getpid(), *__main__.kept]


def meet(folder: Path) -> None:
    """Return when all ranks have come here; each leaves a file in `folder`, which is empty before.

    A rank may leave `dist.barrier` while others are in it. If that rank fails then, gloo may keep the others waiting.
    """
    (folder / str(dist.get_rank())).touch()
    while len(os.listdir(folder)) < dist.get_world_size():
        time.sleep(0.01)


def on(rank: int, action: Callable[[], Any], otherwise: Callable[[], Any] = sums) -> Any:
    return action() if dist.get_rank() == rank else otherwise()


def press() -> None:
    """The stop button; returns when Python has handled it, also where another thread takes the signal."""
    hearing, telling = socket.socketpair()
    with hearing, telling:
        telling.setblocking(False)
        before = signal.set_wakeup_fd(telling.fileno())
        try:
            os.kill(os.getpid(), signal.SIGINT)
            hearing.recv(1)
        finally:
            signal.set_wakeup_fd(before)


def boom() -> None:
    raise ValueError("boom")  # the culprit

"""What ranks do in the tests of calls and sessions."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def on(rank: int, action: Callable[[], Any], otherwise: Callable[[], Any] = sums) -> Any:
    return action() if dist.get_rank() == rank else otherwise()


def boom() -> None:
    raise ValueError("boom")  # the culprit

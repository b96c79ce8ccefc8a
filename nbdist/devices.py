"""Which device each rank of this machine works with, and where its collectives' tensors have to be."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def visible_gpus() -> int:
    """How many CUDA devices this process may use. Creates no CUDA context where the driver has NVML."""
    if "torch" not in sys.modules and importlib.metadata.version("torch").endswith("+cpu"):
        return 0  # without the seconds that importing it takes
    import torch

    return torch.cuda.device_count()


def choose_devices(nranks: int, devices: str | Sequence[str] | None) -> list[str]:
    """A device for each rank. Raises `ValueError` where there are not enough."""
    if devices == "cpu":
        return ["cpu"] * nranks
    if devices is not None and not isinstance(devices, str):
        if len(devices) != nranks:
            raise ValueError(f"devices={list(devices)!r} names {len(devices)} devices for {nranks} ranks")
        return [str(device) for device in devices]
    if devices not in (None, "cuda"):
        raise ValueError(f"devices={devices!r}: 'cpu', 'cuda', or a list with one device for each rank")
    gpus = visible_gpus()
    if gpus == 0 and devices is None:
        return ["cpu"] * nranks
    if nranks > gpus:
        raise ValueError(
            f"{nranks} ranks want a GPU each, but {gpus} GPU{'s are' if gpus != 1 else ' is'} visible. Ask for "
            f'{gpus or 1} or fewer, or for CPU ranks: Session({nranks}, devices="cpu").run(fn, ...)'
        )
    return [f"cuda:{rank}" for rank in range(nranks)]


def collective_device() -> torch.device:
    """In a rank: its GPU if the ranks talk through NCCL, otherwise the CPU. Needs a process group."""
    import torch
    import torch.distributed as dist

    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

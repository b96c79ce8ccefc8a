"""NCCL in a rank: its environment variables, its process groups, and errors that torch does not raise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..wire.messages import World
from ..wire.rendezvous import LOOPBACK_INTERFACE

#: By default torch ends the process (SIGABRT) when a collective times out, and when the context of the GPU is lost
#: (https://github.com/pytorch/pytorch/issues/126544). With these the collective is aborted, and the rank raises. Before
#: it aborts, torch sleeps for four times the "dump" timeout, 15 s by default, and a thread that has written a dump
#: sleeps for eight minutes, which the end of the process group waits for. torch before 2.7 cannot be asked whether a
#: collective was aborted (see `check`): it goes on to end the process, which is better than a wrong result.
_RAISE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
#: NCCL refuses two ranks with one GPU on one host. With a host ID of its own, each rank counts as another host, which
#: NCCL reaches through sockets: it uses neither P2P nor shared memory then.
_SHARED_GPU = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
}


def environ(world: World) -> dict[str, str]:
    """Return the variables that NCCL and torch read in this rank. Variables of NCCL that the user has set stay."""
    if "nccl" not in world.backend:
        return {}
    variables = dict(_RAISE) if _can_be_asked() else {}
    places = {}
    if world.shares_gpu and world.world_size > 1:
        number = str(world.rank)
        variables |= {**_SHARED_GPU, "NCCL_HOSTID": f"nbdist-{number}"}
        # For TorchRec, which places the shards of a rank on cuda:{LOCAL_RANK}: each rank has its GPU as cuda:0.
        places = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": number, "GROUP_RANK": number}
    return {name: os.environ.get(name, value) for name, value in variables.items()} | places


def _can_be_asked() -> bool:
    import torch.distributed as dist

    backend = getattr(dist, "ProcessGroupNCCL", None)  # builds for CPUs have none
    return backend is None or hasattr(backend, "get_error")


def backend_of(group: Any) -> Any:
    """Return the NCCL backend of a process group; None without NCCL."""
    torch, dist = sys.modules["torch"], sys.modules["torch.distributed"]
    if not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def abort(group: Any) -> None:
    """Abort the operations of a process group, for any backend."""
    if hasattr(group, "abort"):
        group.abort()
    elif (backend := backend_of(group)) is not None:  # torch before 2.7
        backend.abort()


def check(groups: Iterable[Any]) -> None:
    """Raise `DistBackendError` if a collective was aborted in one of these process groups.

    Otherwise the rank does not notice it: the GPU continues with the earlier content of the result's memory.
    """
    for name in _errors(groups):
        what = {
            "TIMEOUT": "a collective took longer than its timeout (`backend={'timeout': seconds}`), and was aborted",
            "COMM_ERROR": "NCCL communication with another rank failed: NCCL communicator was aborted",
            "REMOTE_ERROR": "another rank reported an error: NCCL communicator was aborted",
        }.get(name, f"NCCL reported {name}")
        raise sys.modules["torch.distributed"].DistBackendError(
            f"rank {os.environ.get('RANK', '?')}: {what}. What was computed with its result is invalid"
        )


def _errors(groups: Iterable[Any]) -> Iterator[str]:
    for group in groups:
        backend = backend_of(group)
        if hasattr(backend, "get_error"):  # torch 2.7
            name = backend.get_error().name
            if name != "SUCCESS":
                yield name

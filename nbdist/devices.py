"""The device of each rank of this machine, the GPUs that the rank sees, and the backend of the process group."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .checks import shown
from .system.gpus import names_by_number
from .system.visible_devices import build, visible

if TYPE_CHECKING:
    import torch

#: torch's own choice for ranks with a GPU each: collectives of CPU tensors, and of objects, work as well.
NCCL = "cpu:gloo,cuda:nccl"

_NAME = re.compile(r"cpu|cuda:\d+|GPU-[\w-]+|MIG-[\w/-]+")
_SUPPORTED = (
    "devices must be 'cpu', 'cuda', or a list with a device for each rank ('cpu', 'cuda:1', or a name of "
    "`nvidia-smi -L`, such as 'GPU-6e5f...' or 'MIG-8f1c...')"
)

_NCCL_ON_SHARED = (
    "ranks that share a GPU talk through NCCL over sockets, as if each were on a host of its own: to try NCCL out, not "
    "for speed"
)


class Place(NamedTuple):
    """The GPUs that a rank sees, and its own device."""

    visible: str | None
    """The rank's CUDA_VISIBLE_DEVICES. None: the variable is not changed."""
    device: str
    """`cpu`, or `cuda:N`, where N counts the GPUs that the rank sees."""


def visible_gpus() -> int:
    """Return the number of CUDA devices that this process may use, without a CUDA context if the driver has NVML."""
    if "torch" not in sys.modules:
        if build().endswith("+cpu"):
            return 0  # without the seconds that importing it takes
        # Not here: an interrupt would leave half of it, which some versions cannot complete.
        importing = threading.Thread(target=_import_torch, name="nbdist: import torch")
        importing.start()
        importing.join()
    import torch

    return torch.cuda.device_count()


def _import_torch() -> None:
    with contextlib.suppress(Exception):  # whoever waits for it tries again, and sees it
        importlib.import_module("torch")


@functools.cache
def gpu_names() -> list[str]:
    """Return the UUIDs of this machine's GPUs, in the driver's order; an empty list without NVML."""
    if build().endswith("+cpu"):
        return []
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import torch

        return torch.cuda._raw_device_uuid_nvml() or []
    return []


def has_nccl() -> bool:
    """Return whether this build of torch has NCCL. Builds for Jetson have none."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


def choose_devices(
    nranks: int, devices: str | Sequence[Any] | None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Choose a device for each rank: `cpu`, `cuda:N` with N counted among the visible GPUs, or the name of a GPU.

    `environ` are the ranks' variables. Raises `ValueError` for devices that do not exist, or that cannot be combined.
    """
    if devices == "cpu":
        return ["cpu"] * nranks
    if not isinstance(devices, str | Sequence | None):
        raise TypeError(f"{_SUPPORTED}, got {shown(devices)}")
    if devices is not None and not isinstance(devices, str):
        return _listed(nranks, devices, environ)
    if devices not in (None, "cuda"):
        raise ValueError(f"{_SUPPORTED}, got {devices!r}")
    gpus, are_visible = count_gpus(environ)
    if gpus == 0 and devices is None:
        return ["cpu"] * nranks
    if nranks > gpus:
        share = f", or let them share one, to try something out: devices={['cuda:0'] * nranks!r}" if gpus == 1 else ""
        raise ValueError(
            f"{nranks} ranks need a GPU each, but {are_visible}. Ask for "
            f'{gpus or 1} or fewer, or for CPU ranks: Session({nranks}, devices="cpu").run(fn, ...){share}'
        )
    return [f"cuda:{rank}" for rank in range(nranks)]


def _listed(nranks: int, devices: Sequence[Any], environ: Mapping[str, str]) -> list[str]:
    names = [f"cuda:{one}" if type(one) is int else str(one) for one in devices]
    if len(names) != nranks:
        raise ValueError(f"devices must be one for each of {nranks} ranks, got {len(names)}: {names!r}")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{_SUPPORTED}, got {name!r}")
    if len({re.split("[:-]", name)[0] for name in names}) > 1:
        raise ValueError(f"devices must be of one kind (CPUs, numbers of GPUs, or names of GPUs), got {names!r}")
    if names[0].startswith("GPU-"):
        return _uuids(names, environ)
    if names[0].startswith("MIG-"):
        variable, entries, _ = visible(environ, ())
        for name in names:
            if entries is not None and name not in entries:
                raise ValueError(f"devices must be among {variable}={environ[variable]}, got {name!r}")
    elif names[0] != "cpu":
        gpus, are_visible = count_gpus(environ)
        unknown = [name for name in names if int(name[5:]) >= gpus]
        if unknown:
            raise ValueError(f"devices must be GPUs that the notebook sees, got {unknown[0]!r}: {are_visible}")
    return names


def _uuids(names: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the full names of GPUs, given their beginnings."""
    allowed = known = gpu_names()
    entries = visible(environ, known).entries
    if entries is not None:
        by_number = names_by_number(environ) if any(map(str.isdigit, entries)) else []
        allowed = by_number or entries
    if not allowed and entries is None:  # unknown here: CUDA will
        return list(names)

    def full(name: str) -> str:
        found = [one for one in allowed if one.startswith(name)]
        if len(found) != 1:
            what = "is not one GPU, but the beginning of several" if found else "is no GPU that this notebook may use"
            raise ValueError(f"devices: {name} {what}: {', '.join(allowed)}")
        return found[0]

    return [full(name) for name in names]


def count_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of GPUs, or of parts of GPUs, that ranks with this environment may use, also in words.

    torch answers for this process. Once this process has used CUDA, the answer does not follow the variable any more.
    """
    shown = visible(environ, ())
    if shown.entries is None:
        gpus = visible_gpus()
    elif shown.entries and shown.entries[0].startswith("MIG-"):
        gpus = len(shown.entries)  # parts: a process sees the first only
    else:
        known = gpu_names()
        shown = visible(environ, known)
        gpus = len(shown.entries or ())
        if environ.get(shown.variable) == os.environ.get(shown.variable):
            own = visible_gpus()
            gpus = min(gpus, own) if own == 0 or not known else gpus
    return gpus, f"{gpus} GPU{'s are' if gpus != 1 else ' is'} visible{shown.said(environ)}"


def visible_entries(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that ranks with this environment may use, as entries of CUDA_VISIBLE_DEVICES. None: all."""
    return visible(environ, gpu_names()).entries


def hidden_gpus(environ: Mapping[str, str]) -> str:
    """Return a notice for CPU ranks on a machine whose GPUs are hidden by a mistake in CUDA_VISIBLE_DEVICES."""
    shown = visible(environ, gpu_names())
    return f"no GPU is visible{shown.said(environ)}" if shown.ended and gpu_names() and not shown.entries else ""


def place_ranks(devices: Sequence[str], entries: Sequence[str] | None) -> list[Place]:
    """Return the GPUs that each rank sees and its device, given the results of `choose_devices` and
    `visible_entries`.

    As under torchrun, all ranks see all GPUs of the session, and LOCAL_RANK is the number of the rank's own GPU among
    them. Two cases differ: ranks that share a GPU, and parts of GPUs (MIG): CUDA shows only the first part to a
    process. Then each rank sees only its own GPU.
    """
    if devices[0] in ("cpu", "cuda"):  # a cluster's ranks see what it has reserved
        return [Place("" if device == "cpu" else None, device) for device in devices]
    own = own_gpus(devices, entries)
    if shared(own):
        return [Place(entry, "cuda:0") for entry in own]
    return [Place(",".join(own), f"cuda:{number}") for number in range(len(own))]


def own_gpus(devices: Sequence[str], entries: Sequence[str] | None) -> list[str]:
    """Return the GPU of each rank on this machine as an entry of CUDA_VISIBLE_DEVICES, given the results of
    `choose_devices` and `visible_entries`."""

    def name(device: str) -> str:
        if not device.startswith("cuda:"):
            return device
        return device[5:] if entries is None else entries[int(device[5:])]

    return [name(device) for device in devices]


def shared(devices: Sequence[str]) -> bool:
    """Return whether several ranks share a GPU, or ranks use parts of GPUs."""
    return len(set(devices)) < len(devices) or devices[0].startswith("MIG-")


def choose_backend(devices: Sequence[str], asked: str | None, entries: Sequence[str] | None = None) -> tuple[str, str]:
    """Choose the backend of the process group, and return it with a notice for the user; `asked` is the user's choice.

    Raises `ValueError` for NCCL with CPU ranks, or with a build of torch that lacks it.
    """
    gpus = devices[0] != "cpu"
    local = gpus and devices[0] != "cuda"  # a cluster's ranks may have another build of torch
    several = local and len(devices) > 1 and shared(own_gpus(devices, entries))
    if asked is not None:
        if "nccl" in asked and not gpus:
            raise ValueError(f"backend must be 'gloo' for ranks on the CPU, got {asked!r}: NCCL needs GPUs")
        if "nccl" in asked and local and not has_nccl():
            raise ValueError(f"backend must be 'gloo' or None, got {asked!r}: this build of torch has no NCCL")
        return asked, _NCCL_ON_SHARED if "nccl" in asked and several else ""
    if several:
        return "gloo", "ranks that share a GPU talk through gloo: NCCL wants a whole one for each"
    if local and not has_nccl():
        return "gloo", "" if len(devices) == 1 else "ranks talk through gloo: this build of torch has no NCCL"
    return (NCCL if gpus else "gloo"), ""


def collective_device() -> torch.device:
    """Return, in a rank, its GPU if the process group uses NCCL, otherwise the CPU. Needs a process group."""
    import torch
    import torch.distributed as dist

    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_device() -> torch.device:
    """Return this rank's own device: its GPU, or the CPU in a CPU rank, which sees no GPU.

    `model.to(rank_device())` works on GPUs and on CPUs, with one rank or several on a GPU. In the notebook itself it
    returns the device that torch would choose.

    Examples:
        >>> in_ddp.options(devices="cpu")(2, rank_device)
        device(type='cpu')
    """
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

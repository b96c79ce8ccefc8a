"""Memory, load and processes of GPUs, read from the driver with nvidia-ml-py, if it is installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .cores import parse_cores

_BUS = Path("/sys/bus/pci/devices")
#: A program that prints the names of the GPUs that CUDA shows to it.
_NAMES = """
import ctypes, uuid
driver, count, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count))
for number in range(count.value):
    if not (driver.cuDeviceGet(ctypes.byref(device), number) or driver.cuDeviceGetUuid(name, device)):
        print(f"GPU-{uuid.UUID(bytes=bytes(name))}")
"""
#: NVML's number for an error without a name.
_UNKNOWN = 999


class GpuUse(NamedTuple):
    """The use of a GPU at one moment."""

    name: str
    used: int
    """The memory, in bytes."""
    total: int
    load: int | None
    """The percentage of the time in which the GPU worked; None if it is unknown, as for parts of a GPU."""
    processes: Mapping[int, int | None]
    """For each process, by pid, the bytes that it uses there; None if the driver does not report them."""


def look(gpu: str) -> GpuUse | None:
    """Return the current use of a GPU; None if it is unknown.

    `gpu` is its entry in CUDA_VISIBLE_DEVICES: a number or a name. CUDA numbers the fastest GPU first, and the driver
    numbers by the bus. So if GPUs differ, the use of a GPU that is given by number is known only if CUDA_DEVICE_ORDER
    is PCI_BUS_ID.
    """
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            handle = _handle(nvml, gpu)
            memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError:
            return None
        load, processes = None, []
        with contextlib.suppress(nvml.NVMLError):
            load = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with contextlib.suppress(nvml.NVMLError):
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        text = name.decode() if isinstance(name, bytes) else str(name)
        return GpuUse(text, memory.used, memory.total, load, {one.pid: one.usedGpuMemory for one in processes})


def names_by_number(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the GPUs that a process with these variables sees, by CUDA's numbers; an empty list without
    CUDA.

    CUDA is asked in another process: this one goes on to see what it saw when it first used CUDA.
    """
    command = [sys.executable, "-I", "-S", "-c", _NAMES]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.split() if done.returncode == 0 else []


def local_cores(gpu: str) -> list[int]:
    """Return the cores of the NUMA node of a GPU, which is given by its entry in CUDA_VISIBLE_DEVICES; an empty
    list if they are not known.
    """
    with _nvml() as nvml:
        if nvml is None:
            return []
        try:
            bus = nvml.nvmlDeviceGetPciInfo(_handle(nvml, gpu)).busId
        except nvml.NVMLError:
            return []
    address = (bus.decode() if isinstance(bus, bytes) else bus).lower()[-len("0000:00:00.0") :]
    try:
        return parse_cores((_BUS / address / "local_cpulist").read_text())
    except OSError:
        return []


def _handle(nvml: Any, gpu: str) -> Any:
    if not gpu.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(gpu)
    if not _counts_as_cuda(nvml):
        raise nvml.NVMLError(_UNKNOWN)
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu))


def _counts_as_cuda(nvml: Any) -> bool:
    """Return whether the driver numbers the GPUs as CUDA does."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return len({nvml.nvmlDeviceGetName(handle) for handle in handles}) == 1


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Return nvidia-ml-py, connected with the driver; None without it or without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or somebody else's module of that name
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def in_words(use: GpuUse, ranks: Mapping[int, int]) -> str:
    """Return a text about the processes that use a GPU, and their memory. `ranks` are this session's ranks, by pid."""
    users = [f"{_who(pid, ranks)} {'?' if size is None else gib(size)}" for pid, size in use.processes.items()]
    by = f": {', '.join(users)}" if users else ""
    return f"{use.name}, {gib(use.used)} of {gib(use.total)} in use{by}"


def gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _who(pid: int, ranks: Mapping[int, int]) -> str:
    if pid in ranks:
        return f"rank {ranks[pid]}"
    if pid == os.getpid():
        return "this notebook"
    import psutil

    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:  # of another container
        return f"pid {pid}"

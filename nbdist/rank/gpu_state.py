"""The state of a rank's GPUs at the end of a call, after an error, and between calls."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from ..system import visible_devices
from . import nccl

#: Seconds to wait for the GPUs after an exception: a kernel may wait for a rank that will not come.
_PATIENCE = 1.0

_allocated = 0  # bytes after the last collection


def prepare(visible: str | None, device: str) -> None:
    """Create the context of the rank's GPU, before the rank knows its call. `visible`: the GPUs that it sees."""
    if visible is not None:
        os.environ.update(visible_devices.variables(visible))
    if device != "cpu":
        torch = importlib.import_module("torch")
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
        torch.cuda.synchronize()


def finish(groups: Iterable[Any]) -> None:
    """Wait until each GPU has finished the work of the call, if torch uses GPUs.

    Raises the exceptions of the last kernels, and `DistBackendError` if a collective in one of the process `groups` was
    aborted. Without this, the former would be raised by the next call, and the latter by none.
    """
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        for gpu in _used():
            torch.cuda.synchronize(gpu)
        nccl.check(groups)


def lost() -> bool:
    """Return whether this process can no longer use one of its GPUs, whatever exception was raised.

    CUDA repeats such an error in every later call: a failed assertion, an illegal access, and other errors after which
    the process must be restarted.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return False
    errors: list[Exception] = []

    def synchronize(gpu: int) -> None:
        try:
            torch.cuda.synchronize(gpu)
        except Exception as exc:
            errors.append(exc)

    try:
        gpus = _used()
    except RuntimeError:
        return True
    # A thread for each GPU: another one may wait longer than the patience.
    threads = [threading.Thread(target=synchronize, args=(gpu,), daemon=True) for gpu in gpus]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _PATIENCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return bool(errors)


def _used() -> list[int]:
    """Return the GPUs on which this process has a context. A question to another GPU would create a context there."""
    torch = sys.modules["torch"]
    return [gpu for gpu in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(gpu)]


def collect_garbage() -> None:
    """Free reference cycles of the call, such as every learner of fastai, if they may use GPU memory.

    The collector runs by the number of Python objects, and one of them may hold a gigabyte of GPU memory.
    """
    global _allocated
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # an allocator that does not count
        if _memory_allocated() > _allocated:
            gc.collect()
        _allocated = _memory_allocated()


def _memory_allocated() -> int:
    return sum(map(sys.modules["torch"].cuda.memory_allocated, _used()))


def empty_cache() -> None:
    """Free the GPU memory that torch keeps for later and that no tensor uses."""
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

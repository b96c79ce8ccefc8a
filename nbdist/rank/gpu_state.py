"""The state of a rank's GPU at the end of a call, after an error, and between calls."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterable
from typing import Any

from . import nccl

#: Seconds to wait for the GPU after an exception: a kernel may wait for a rank that will not come.
_PATIENCE = 1.0

_allocated = 0  # bytes after the last collection


def finish(groups: Iterable[Any]) -> None:
    """Wait until the GPU has finished the work of the call, if torch uses a GPU.

    Raises the exceptions of the last kernels, and `DistBackendError` if a collective in one of the process `groups` was
    aborted. Without this, the former would be raised by the next call, and the latter by none.
    """
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        nccl.check(groups)


def lost() -> bool:
    """Return whether this process can no longer use its GPU, whatever exception was raised.

    CUDA repeats such an error in every later call: a failed assertion, an illegal access, and other errors after which
    the process must be restarted.
    """
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return False
    errors: list[Exception] = []

    def synchronize(device: int) -> None:
        try:
            torch.cuda.synchronize(device)
        except Exception as exc:
            errors.append(exc)

    try:
        device = torch.cuda.current_device()
    except RuntimeError:
        return True
    thread = threading.Thread(target=synchronize, args=(device,), name="nbdist: synchronize", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(errors)


def collect_garbage() -> None:
    """Free reference cycles of the call, such as every learner of fastai, if they may use GPU memory.

    The collector runs by the number of Python objects, and one of them may hold a gigabyte of GPU memory.
    """
    global _allocated
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # an allocator that does not count
        if torch.cuda.memory_allocated() > _allocated:
            gc.collect()
        _allocated = torch.cuda.memory_allocated()


def empty_cache() -> None:
    """Free the GPU memory that torch keeps for later and that no tensor uses."""
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

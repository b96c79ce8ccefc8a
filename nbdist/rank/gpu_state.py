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
    """Wait until the GPU has done what the call has asked of it, where torch uses one.

    Raises what its last kernels raise, and `DistBackendError` if a collective in one of the process `groups` was
    aborted: otherwise the next call would raise the first, and nothing the second.
    """
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        nccl.check(groups)


def lost() -> bool:
    """Return whether this process can no longer use its GPU, whatever exception was raised.

    CUDA repeats such an error in every later call: an assertion, an illegal access, and whatever else requires that
    the process is restarted.
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
    """Free what the call has left in reference cycles, as every learner of fastai is, if that may be on the GPU.

    The collector runs by the number of Python objects, and one of them may hold a gigabyte there.
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
    """Give back what torch keeps of the GPU's memory for later, where nothing refers to it any more."""
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

"""The state of the CUDA driver: after a process has initialized the driver, no fork of this process can use a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

#: For the server: with it, `torch.cuda.is_available()`, which libraries ask while they are imported, counts the GPUs by
#: NVML. Otherwise it calls `cuInit`.
WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

_LIBRARY = "libcuda.so.1"
#: What HIP opens when it is initialised: torch for AMD's GPUs calls them CUDA devices, too.
_AMD = "/dev/kfd"


def initialised() -> bool:
    """Return whether `cuInit` was called in this process. `torch.cuda.is_initialized()` knows only torch's own
    contexts.

    This loads no library. Until `cuInit`, every function of the driver returns CUDA_ERROR_NOT_INITIALIZED.
    """
    if sys.platform != "linux":
        return False
    return _cuda_initialised() or _hip_initialised()


def _cuda_initialised() -> bool:
    try:
        driver = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


def _hip_initialised() -> bool:
    if not os.path.exists(_AMD):
        return False
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed by now
            if os.readlink(f"/proc/self/fd/{fd}") == _AMD:
                return True
    return False

"""Whether this process has initialised the CUDA driver, after which no fork of it can use a GPU."""

from __future__ import annotations

import ctypes
import os
import sys

#: For the server: with it, `torch.cuda.is_available()`, which libraries ask while they are imported, counts the GPUs by
#: NVML. Otherwise it calls `cuInit`.
WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

_LIBRARY = "libcuda.so.1"


def initialised() -> bool:
    """Whether somebody has called `cuInit` here. `torch.cuda.is_initialized()` only knows of torch's own contexts.

    A library that is not loaded stays so. Until `cuInit`, every function of it answers CUDA_ERROR_NOT_INITIALIZED.
    """
    if sys.platform != "linux":
        return False
    try:
        driver = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0

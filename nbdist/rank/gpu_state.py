"""What is left of a rank's GPU: after an error, and between calls."""

from __future__ import annotations

import gc
import re
import sys

#: CUDA's errors after which "the process must be terminated and relaunched", as its documentation says of each.
_FATAL = re.compile(
    r"CUDA error: (device-side assert triggered|an illegal memory access|an illegal instruction|misaligned address"
    r"|unspecified launch failure|the launch timed out|hardware stack error|invalid program counter"
    r"|operation not supported on global/shared address space|uncorrectable (ECC|NVLink) error)"
)


def is_lost(exc: BaseException) -> bool:
    """Whether no further call in this process can use the GPU after this exception."""
    try:
        return isinstance(exc, RuntimeError) and bool(_FATAL.search(str(exc)))
    except Exception:  # its text raises
        return False


def empty_cache() -> None:
    """Give back what torch keeps of the GPU's memory for later, where nothing refers to it any more."""
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

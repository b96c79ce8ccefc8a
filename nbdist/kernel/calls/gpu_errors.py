"""Lines shown under a rank's CUDA error: the GPU, the processes that use its memory, a failed assertion on the GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import text_of
from ...system.gpus import in_words, look

_CUDA = re.compile(
    r"\bCUDA error|CUDA out of memory|\bcu(BLAS|DNN|SPARSE|FFT)\w*[ _](error|STATUS)|\bCUBLAS_STATUS", re.I
)
_NCCL = re.compile(r"\bNCCL\b|a collective took longer than its timeout")
#: The line that torch writes about a collective that it aborts.
_TIMEOUT = re.compile(r"Watchdog caught (collective operation timeout: .*)")
#: Advice about errors that the function did not cause, by a part of their text or of the rank's output.
_ADVICE = {
    "are busy or unavailable": "the compute mode of the GPU may allow only one process (see `nvidia-smi -q -d "
    "COMPUTE`), which is the notebook or another rank: set `nvidia-smi -c DEFAULT`, or start one rank for each GPU",
    "Error while creating shared memory segment": "/dev/shm is full, or too small for NCCL, as in containers with 64 "
    "MB of it: make it larger (`docker run --shm-size=1g`), or set Session(env={'NCCL_SHM_DISABLE': '1'}), which is "
    "slower",
}
#: The errors of torch and CUDA in a rank that uses CUDA and has no GPU. The one about a fork: a module that the fork
#: server imported, such as torchrec, has asked CUDA for GPUs on a machine without NVIDIA's driver.
_NO_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver"
    r"|Cannot re-initialize CUDA in forked subprocess"
    r"|no CUDA-capable device|no attribute '_cuda_|Attempting to deserialize object on a CUDA device",
    re.I,
)
#: The line that a failed assertion of a GPU kernel writes, once for each thread of the kernel.
_ASSERTION = re.compile(r"^(?P<where>.*?): (block: .*?, thread: .*? )?(?P<what>Assertion `.*` failed\.?)", re.M)


def explain_missing_gpu(error: BaseException, rank: int) -> list[str]:
    """Return lines to show under the exception of a CPU rank whose code uses CUDA; none for other exceptions."""
    if not _NO_GPU.search(text_of(error)):
        return []
    return [
        f"rank {rank} works on the CPU. Use the rank's own device, which is right on CPUs and on GPUs: "
        f"model.to(nbdist.rank_device()), torch.load(file, map_location=nbdist.rank_device())"
    ]


def explain_gpu_error(
    error: BaseException,
    rank: int,
    device: str,
    gpu: str | None,
    pids: Mapping[int, int],
    log: str,
    *,
    lost: bool = False,
) -> list[str]:
    """Return lines to show under the exception of a rank with a GPU; none for an exception that CUDA did not cause.

    Args:
        error: The exception of the rank.
        rank, device: The number of the rank, and its device as the session names it.
        gpu: The GPU's entry in CUDA_VISIBLE_DEVICES; None for a GPU of another machine.
        pids: The session's ranks by pid.
        log: The output of the rank.
        lost: Whether the rank cannot use its GPU any more. Then CUDA caused the exception, whatever its text.
    """
    text = text_of(error)
    nccl = isinstance(error, RuntimeError) and bool(_NCCL.search(text))
    lines = [advice for sign, advice in _ADVICE.items() if sign in text or (nccl and sign in log)]
    if nccl and (timeouts := _TIMEOUT.findall(log)):
        lines.append(f"rank {rank}: {timeouts[-1]}")
    if not lost and not (isinstance(error, RuntimeError) and _CUDA.search(text)):
        return lines
    if found := _ASSERTION.search(log):
        lines.append(f"on the GPU: {found['where']}: {found['what']}")
    use = None if gpu is None else look(gpu)
    if use is not None:
        lines.append(f"rank {rank} works on {device} ({in_words(use, pids)})")
    else:
        who = "" if gpu is None else "; install nvidia-ml-py to see which processes use its memory"
        lines.append(f"rank {rank} works on {device}{who}")
    return lines

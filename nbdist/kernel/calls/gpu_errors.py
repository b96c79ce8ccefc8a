"""Lines shown under a rank's CUDA error: the GPU, the processes that use its memory, the output of its kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import text_of
from ...system.gpus import in_words, look

_CUDA = re.compile(
    r"\bCUDA error|CUDA out of memory|\bcu(BLAS|DNN|SPARSE|FFT)\w*[ _](error|STATUS)|\bCUBLAS_STATUS", re.I
)
_NCCL = re.compile(r"\bNCCL\b|a collective took longer than its timeout")
#: What torch writes about a collective that it aborts.
_TIMEOUT = re.compile(r"Watchdog caught (collective operation timeout: .*)")
#: What to do about errors that have nothing to do with the function, by what their text or the rank's output says.
_ADVICE = {
    "are busy or unavailable": "the GPU may be in a compute mode that admits one process alone (`nvidia-smi -q -d "
    "COMPUTE`), and the notebook or another rank is that one: `nvidia-smi -c DEFAULT`, or one rank with a GPU",
    "Error while creating shared memory segment": "/dev/shm is full, or too small for NCCL, as in containers with 64 "
    "MB of it: more (`docker run --shm-size=1g`), or Session(env={'NCCL_SHM_DISABLE': '1'}), which is slower",
}
#: What torch and CUDA say to code that asks a rank without a GPU for one.
_NO_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver"
    r"|no CUDA-capable device|no attribute '_cuda_|Attempting to deserialize object on a CUDA device",
    re.I,
)
#: What a kernel on the GPU writes where one of its assertions does not hold, once for each of its threads.
_ASSERTION = re.compile(r"^(?P<where>.*?): (block: .*?, thread: .*? )?(?P<what>Assertion `.*` failed\.?)", re.M)


def explain_missing_gpu(error: BaseException, rank: int) -> list[str]:
    """Return what to show under the exception of a rank on the CPU whose code has asked for a GPU."""
    if not _NO_GPU.search(text_of(error)):
        return []
    return [
        f"rank {rank} works on the CPU. Ask for the rank's own device, which is right on CPUs and on GPUs: "
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
    """Return lines to show under the exception of a rank; none for an exception that is not CUDA's.

    Args:
        error: What the rank raised.
        rank, device: The rank, and its device as the session names it.
        gpu: Its entry in CUDA_VISIBLE_DEVICES; None where it is not this machine's.
        pids: Pid → rank, of the session's ranks.
        log: What the rank has written.
        lost: Whether the rank cannot use its GPU any more: then the exception is one of CUDA's, whatever its text.
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
        who = "" if gpu is None else "; who uses its memory is told where nvidia-ml-py is installed"
        lines.append(f"rank {rank} works on {device}{who}")
    return lines

"""An imitated GPU: torch's CUDA build works with it on a machine without one. See README.md.

python tests/gpu/imitated -m pytest tests/gpu    # an interpreter that has two
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_BUILT = HERE.parents[2] / "build" / "imitated-gpu"
_PRELOADED = "libcudart-imitated.so"
#: The libraries by their sources.
_LIBRARIES = {"cudart.c": _PRELOADED, "cuda.c": "libcuda.so.1", "nvml.c": "libnvidia-ml.so.1"}


def build(folder: Path = _BUILT) -> Path:
    """Compile what is older than its source, against the CUDA headers that torch's CUDA build has brought along."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(file.stat().st_mtime for file in HERE.rglob("*.[ch]"))
    for source, library in _LIBRARIES.items():
        target = folder / library
        if target.exists() and target.stat().st_mtime > newest:
            continue
        made = target.with_suffix(f".{os.getpid()}")  # several runs may build at a time
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wno-unused-function", f"-I{HERE}", f"-I{_cuda_headers()}"]
        subprocess.run(["gcc", *options, "-o", made, HERE / source, "-lpthread", "-ldl"], check=True)
        made.replace(target)
    return folder


def _cuda_headers() -> Path:
    site = Path(sysconfig.get_paths()["purelib"])
    found = sorted(site.glob("nvidia/*/include/cuda_runtime_api.h"))
    if not found:
        raise FileNotFoundError(
            f"CUDA's headers must be in {site} (nvidia-cuda-runtime, which a CUDA build of torch brings along)"
        )
    return found[-1].parent


@contextlib.contextmanager
def environment(
    gpus: int = 2, memory_mib: int = 16384, capability: str = "9.0", exclusive: bool = False
) -> Iterator[dict[str, str]]:
    """Yield the variables of a program that is to have imitated GPUs.

    Args:
        gpus: How many, at most 8.
        memory_mib: Memory of each, in MiB.
        capability: Compute capability of each, such as "7.5,9.0"; the last one holds for the rest.
        exclusive: Whether one process to a GPU is allowed.
    """
    folder = build()
    with tempfile.NamedTemporaryFile(prefix="state-", dir=folder) as state:
        yield {
            "LD_PRELOAD": str(folder / _PRELOADED),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
            "IMITATED_STATE": state.name,
            "IMITATED_GPUS": str(gpus),
            "IMITATED_MEMORY_MIB": str(memory_mib),
            "IMITATED_CAPABILITY": capability,
            "IMITATED_EXCLUSIVE": str(int(exclusive)),
        }


def program(code: str, environ: dict[str, str] | None = None, **machine: Any) -> str:
    """Run a Python program with a machine of its own, and return what it writes to standard output.

    Args:
        code: The program.
        environ: Variables on top of this process' own.
        machine: Arguments of `environment`.
    """
    with environment(**machine) as variables:
        own = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})}
        done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

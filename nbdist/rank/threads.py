"""The thread pools of numeric libraries: as large as the rank's share of the cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

#: Where each library finds the size of its pool, by threadpoolctl's names of those whose pool can be changed later. The
#: others make theirs when they first need it.
_VARIABLES = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "accelerate": "VECLIB_MAXIMUM_THREADS",
    "numexpr": "NUMEXPR_NUM_THREADS",
    "polars": "POLARS_MAX_THREADS",
}

#: How many processes torch.compile starts: else as many as there are cores, up to 32, in each rank.
_COMPILING = "TORCHINDUCTOR_COMPILE_THREADS"

_pools: list[Any] = []


def find_pools() -> None:
    """Find the pools of all loaded libraries.

    This runs in the server, once for all ranks, because it takes some milliseconds. Libraries that a rank loads later
    read their number of threads from the environment.
    """
    from threadpoolctl import ThreadpoolController

    _pools[:] = ThreadpoolController().lib_controllers


def variables(threads: int) -> dict[str, str]:
    """Return the environment variables that limit threads; variables that the user has set stay."""
    names = {name: os.environ.get(name, str(threads)) for name in [*_VARIABLES.values(), _COMPILING]}
    return {"OMP_NUM_THREADS": str(threads), **names}


def number(environ: Mapping[str, str], variable: str, default: int) -> int:
    """Return the number of threads in a variable; the default if it has none that libraries use: they ignore 0, too."""
    asked = environ.get(variable, "").partition(",")[0]  # a list has one number for each nesting level
    return int(asked) if asked.isdigit() and int(asked) else default


def resize_pools(threads: int) -> None:
    """Resize the thread pools of the loaded libraries to the number in the environment, otherwise to `threads`.

    The server has OpenBLAS loaded with a single thread, since a process with threads must not fork.
    """
    compiler: Any = sys.modules.get("torch._inductor.config")  # has read its variable where it is loaded
    if compiler is not None:
        compiler.compile_threads = number(os.environ, _COMPILING, threads)
    for pool in _pools:
        pool.set_num_threads(number(os.environ, _VARIABLES.get(pool.internal_api, ""), threads))

"""Run a function of a notebook on every GPU, or on CPU ranks, with one line."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture.explain import explain
    from .capture.scattering import scatter
    from .engines import use
    from .engines.ray.options import RayOptions
    from .errors import CaptureError, NbdistError, RankDied, RankTimeout, WorkerDied
    from .kernel.clusters import cluster
    from .kernel.contexts import context
    from .kernel.launch import in_ddp, post_mortem, warm
    from .kernel.parallel import parallel_map
    from .kernel.session import Session
    from .rank.preemption import preempted

__all__ = [
    "CaptureError",
    "NbdistError",
    "RankDied",
    "RankTimeout",
    "RayOptions",
    "Session",
    "WorkerDied",
    "cluster",
    "context",
    "explain",
    "in_ddp",
    "load_ipython_extension",
    "parallel_map",
    "post_mortem",
    "preempted",
    "scatter",
    "unload_ipython_extension",
    "use",
    "warm",
]
__version__ = "0.1.0"

_HOMES = {
    "CaptureError": "errors",
    "NbdistError": "errors",
    "RankDied": "errors",
    "RankTimeout": "errors",
    "RayOptions": "engines.ray.options",
    "Session": "kernel.session",
    "WorkerDied": "errors",
    "cluster": "kernel.clusters",
    "context": "kernel.contexts",
    "explain": "capture.explain",
    "in_ddp": "kernel.launch",
    "parallel_map": "kernel.parallel",
    "post_mortem": "kernel.launch",
    "preempted": "rank.preemption",
    "scatter": "capture.scattering",
    "use": "engines",
    "warm": "kernel.launch",
}


def __getattr__(name: str) -> Any:
    # pytest imports this file wherever nbdist is installed, for its plugin: what is not used costs nothing.
    if name not in _HOMES:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}", name=name, obj=None)
    if sys.platform == "win32" and _HOMES[name].startswith("kernel."):  # there is no module behind them to import
        raise NotImplementedError(
            "nbdist forks its ranks, which Windows cannot do. WSL 2 is Linux: say `wsl --install` in PowerShell, and "
            "install Python, Jupyter and nbdist in there."
        )
    value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nbdist`: start the fork server in the background, and add `%ddp` and `%%ddp`."""
    from .kernel import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext nbdist`."""
    from .kernel import magics

    magics.unload(shell)

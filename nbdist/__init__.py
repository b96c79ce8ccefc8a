"""Run a function of a notebook on every GPU, or on CPU ranks, with one line."""

import importlib as _importlib
import sys as _sys
import typing as _typing

# All other names here begin with an underscore: completion of `from nbdist import` reads this file.
if _typing.TYPE_CHECKING:
    from .capture.explain import explain
    from .capture.per_rank import per_rank
    from .devices import rank_device
    from .engines import use
    from .engines.ray.options import RayOptions
    from .errors import (
        CaptureError,
        NbdistError,
        NotFinite,
        RankDied,
        RankMismatch,
        RankStuck,
        RankTimeout,
        WorkerDied,
    )
    from .kernel.clusters import cluster
    from .kernel.launch import in_ddp, post_mortem, warm
    from .kernel.named.attaching import attach
    from .kernel.named.listing import sessions
    from .kernel.pools.context import context
    from .kernel.pools.parallel_map import parallel_map
    from .kernel.replay import replay_step
    from .kernel.session import Session
    from .rank.preemption import preempted
    from .replay.recording import Recording

__all__ = [
    "CaptureError",
    "NbdistError",
    "NotFinite",
    "RankDied",
    "RankMismatch",
    "RankStuck",
    "RankTimeout",
    "RayOptions",
    "Recording",
    "Session",
    "WorkerDied",
    "attach",
    "cluster",
    "context",
    "explain",
    "in_ddp",
    "parallel_map",
    "per_rank",
    "post_mortem",
    "preempted",
    "rank_device",
    "replay_step",
    "sessions",
    "use",
    "warm",
]
__version__ = "0.1.0"

_PACKAGES = ("fastai", "recsys")

_HOMES = {
    "CaptureError": "errors",
    "NbdistError": "errors",
    "NotFinite": "errors",
    "RankDied": "errors",
    "RankMismatch": "errors",
    "RankStuck": "errors",
    "RankTimeout": "errors",
    "RayOptions": "engines.ray.options",
    "Recording": "replay.recording",
    "Session": "kernel.session",
    "WorkerDied": "errors",
    "attach": "kernel.named.attaching",
    "cluster": "kernel.clusters",
    "context": "kernel.pools.context",
    "explain": "capture.explain",
    "in_ddp": "kernel.launch",
    "parallel_map": "kernel.pools.parallel_map",
    "per_rank": "capture.per_rank",
    "post_mortem": "kernel.launch",
    "preempted": "rank.preemption",
    "rank_device": "devices",
    "replay_step": "kernel.replay",
    "sessions": "kernel.named.listing",
    "use": "engines",
    "warm": "kernel.launch",
}


def __getattr__(name: str) -> _typing.Any:
    # pytest imports this file wherever nbdist is installed, for its plugin: what is not used costs nothing.
    if name in _PACKAGES:
        return _importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        from .checks import nearest

        raise AttributeError(f"module 'nbdist' has no attribute {name!r}{nearest(name, __all__)}", name=name, obj=None)
    if _sys.platform == "win32" and _HOMES[name].startswith("kernel."):  # there is no module behind them to import
        raise NotImplementedError(
            "nbdist forks its ranks, which Windows cannot do. WSL 2 is Linux: run `wsl --install` in PowerShell, and "
            "install Python, Jupyter and nbdist in there."
        )
    value = globals()[name] = getattr(_importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted([*__all__, *_PACKAGES, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])


def load_ipython_extension(shell: _typing.Any) -> None:
    """`%load_ext nbdist`: start the fork server in the background, and add `%ddp` and `%%ddp`."""
    from .kernel.magics import magics

    magics.load(shell)


def unload_ipython_extension(shell: _typing.Any) -> None:
    """`%unload_ext nbdist`."""
    from .kernel.magics import magics

    magics.unload(shell)

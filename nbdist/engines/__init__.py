"""Where ranks come from: on this machine, or on a cluster. The kernel holds them, and so does the node of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from .contract import Engine
from .local import LocalEngine
from .ray.options import RayOptions

_default: str | RayOptions = "local"


def use(engine: str | RayOptions) -> None:
    """Let all later calls of this notebook run there: `in_ddp`, sessions that name no engine, `%ddp`.

    Args:
        engine: "local" for this machine, "ray" for the cluster that runs on it (`ray start`, or RAY_ADDRESS), or
            `RayOptions(...)`.

    `nbdist.cluster` starts one first.

    Raises:
        ValueError: For an engine that there is not.
        NbdistError: Where Ray is not installed.

    Examples:
        >>> use("local")
        >>> use("slurm")
        Traceback (most recent call last):
        ValueError: engine='slurm' is not known; there are 'local', 'ray' and nbdist.RayOptions(...)
    """
    global _default
    resolve(engine)
    _default = engine


def in_use() -> str | RayOptions:
    """What `use` said last."""
    return _default


def resolve(engine: str | RayOptions | None, env: Mapping[str, str] | None = None, start: str = "forkserver") -> Engine:
    """The engine of that name or with these options; None: the one in use.

    `env` are variables for its ranks, `start` is how these start: "forkserver" or "spawn".
    """
    engine = _default if engine is None else engine
    if engine == "local":
        return LocalEngine(env, start)
    if engine == "ray":
        engine = RayOptions(address="auto")
    if isinstance(engine, RayOptions) and start == "spawn":
        raise ValueError('start="spawn" is for ranks of this machine: those of a cluster are forked on their nodes')
    if isinstance(engine, RayOptions):
        from .ray.ranks import RayEngine

        return RayEngine(engine, env)
    raise ValueError(f"engine={engine!r} is not known; there are 'local', 'ray' and nbdist.RayOptions(...)")

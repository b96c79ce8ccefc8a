"""The engines, which start ranks on this machine, on a cluster, or elsewhere, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ..checks import nearest
from ..errors import NbdistError, entry
from .contract import Engine, EngineOptions, MakeEngine

#: The group of entry points by which other packages register engines.
GROUP = "nbdist.engines"

_BUILT_IN = {"local": "nbdist.engines.local", "ray": "nbdist.engines.ray.kernel.ranks"}
_default: str | EngineOptions = "local"


@entry
def use(engine: str | EngineOptions) -> None:
    """Run all later calls of this notebook on this engine: `in_ddp`, sessions that name no engine, `%ddp`.

    Args:
        engine: "local" for this machine, "ray" for the cluster that runs on it (`ray start`, or RAY_ADDRESS), the name
            of an engine that another package registers, or options of an engine, such as `RayOptions(...)`.

    `nbdist.cluster` starts a cluster first.

    Raises:
        ValueError: No engine has this name.
        NbdistError: Ray is not installed, or another engine cannot be imported.

    Examples:
        >>> use("local")
        >>> use("moon")
        Traceback (most recent call last):
        ValueError: engine must be one of 'local', 'ray'..., or options such as nbdist.RayOptions(...), got 'moon'...
    """
    global _default
    resolve(engine)
    _default = engine


def in_use() -> str | EngineOptions:
    """Return the argument of the last `use`."""
    return _default


def names() -> list[str]:
    """Return the names of all engines, nbdist's own first."""
    from importlib.metadata import entry_points

    return [*_BUILT_IN, *sorted(entry_points(group=GROUP).names - set(_BUILT_IN))]


def resolve(
    engine: str | EngineOptions | None, env: Mapping[str, str] | None = None, start: str = "forkserver"
) -> Engine:
    """Return the engine with this name or with these options; None: the engine in use.

    Args:
        engine: As for `use`.
        env: Environment variables for its ranks.
        start: The way to start its ranks: "forkserver" or "spawn".

    Raises:
        ValueError: No engine has this name, or the engine cannot start ranks like this.
        NbdistError: The engine cannot be imported.
    """
    engine = _default if engine is None else engine
    name = engine if isinstance(engine, str) else getattr(engine, "engine", None)
    if not isinstance(name, str) or isinstance(engine, type):
        raise ValueError(_unknown(engine))
    return _find(name)(None if isinstance(engine, str) else engine, env, start)


def _find(name: str) -> MakeEngine:
    if name in _BUILT_IN:
        return importlib.import_module(_BUILT_IN[name]).make  # type: ignore[no-any-return]
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise ValueError(_unknown(name))
    try:
        return found.load()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as exc:
        raise NbdistError(f"the engine {name!r}, which is {found.value}, cannot be imported: {exc}") from exc


def _unknown(engine: object) -> str:
    known = ", ".join(map(repr, names()))
    return (
        f"engine must be one of {known}, or options such as nbdist.RayOptions(...), got {engine!r}"
        f"{nearest(engine, names())}. An engine of another package is found once that package is installed"
    )

"""Processes that a rank spawns (workers of a data loader or a pool): they receive the notebook's functions and classes,
and return instances.

Plain pickle sends these by name, and the `__main__` of a spawned process is empty.
"""

from __future__ import annotations

import io
import types
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..capture.pickler import Pickler
from ..capture.reading import read

_spawns = False  # whether this process has spawned another, or was itself


def install() -> None:
    """Make `multiprocessing` send definitions in `__main__` by value, once this process has spawned another one."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(pickler: Any, obj: Any) -> Any:
    global _spawns
    _spawns = _spawns or context.get_spawning_popen() is not None  # later messages go by queues and pipes
    if not _spawns or not isinstance(obj, (type, types.FunctionType)) or obj.__module__ != "__main__":
        return NotImplemented
    file = io.BytesIO()
    Pickler(file, in_band=True).dump(obj)
    return _load, (file.getvalue(),)


def _load(pickled: bytes) -> Any:
    global _spawns
    _spawns = True
    install()  # in the process that was spawned: what it sends back
    return read(memoryview(pickled), [], originals=[], keep=lambda key, namespace, name: True)

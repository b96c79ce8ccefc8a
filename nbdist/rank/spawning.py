"""Processes that a rank spawns (workers of a data loader): they receive the notebook's functions and classes.

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


def install() -> None:
    """Make `multiprocessing` send definitions in `__main__` by value to processes that it spawns."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(pickler: Any, obj: Any) -> Any:
    by_name = not isinstance(obj, (type, types.FunctionType)) or obj.__module__ != "__main__"
    if by_name or context.get_spawning_popen() is None:
        return NotImplemented
    file = io.BytesIO()
    Pickler(file, in_band=True).dump(obj)
    return _load, (file.getvalue(),)


def _load(pickled: bytes) -> Any:
    return read(memoryview(pickled), [], originals=[], keep=lambda key, namespace, name: True)

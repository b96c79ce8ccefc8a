"""Ranks that wait for the next launch, each with the context of its GPU: `warm(gpus=True)`."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..devices import Place
from ..errors import NbdistError
from ..system.ending import before_servers
from ..wire.protocol import Prepare
from .local import LocalEngine, LocalRanks

#: Beginnings of the names of variables that the drivers of GPUs read when a process uses a GPU for the first time.
_READ_AT_FIRST_USE = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_")
#: Seconds without use after which waiting ranks end.
IDLE = 1800.0


@dataclass(frozen=True)
class _Wanted:
    engine: LocalEngine
    places: Sequence[Place]
    idle: float
    pid: int


class _Waiting:
    """Ranks that wait. They end with this process, or when the last reference to this object is dropped."""

    def __init__(self, wanted: _Wanted) -> None:
        self.places = wanted.places
        self._ranks = ranks = wanted.engine.start(len(wanted.places))
        self._end = weakref.finalize(self, ranks.close)
        before_servers(self._end)
        environ = ranks.inherited()
        self._read = _read_at_first_use(environ)
        for rank, place in enumerate(wanted.places):
            ranks.send(rank, Prepare(environ, place.visible, place.device))
        self._timer = threading.Timer(wanted.idle, stop)
        self._timer.daemon = True
        self._timer.start()

    def fit(self, engine: LocalEngine, env: Mapping[str, str]) -> bool:
        """Return whether these ranks are as those that would be started now."""
        read = _read_at_first_use({**self._ranks.inherited(), **env})
        return read == self._read and engine.would_fork(self._ranks) and not self._ranks.exits()

    def take(self) -> LocalRanks:
        self._timer.cancel()
        self._end.detach()
        return self._ranks

    def close(self) -> None:
        self._timer.cancel()
        self._end()


_lock = threading.RLock()
_wanted: _Wanted | None = None
_waiting: _Waiting | None = None


def require_local(engine: object) -> LocalEngine:
    """Return the engine; raise `ValueError` if its ranks cannot wait for a launch."""
    if isinstance(engine, LocalEngine):
        return engine
    raise ValueError("gpus must be False with this engine, got a number of GPUs: only ranks of the engine 'local' wait")


def start(engine: LocalEngine, places: Sequence[Place], idle: float) -> None:
    """Start ranks for these places, which wait for a launch for `idle` seconds. After a launch, others wait."""
    global _wanted
    with _lock:
        stop()
        _wanted = _Wanted(engine, places, idle, os.getpid())
        refill()


def refill() -> None:
    """Start ranks to wait if they are wanted and none wait. If that fails, the next launch says why."""
    global _waiting
    with _lock, contextlib.suppress(NbdistError, OSError):
        if _wanted is not None and _waiting is None and _wanted.pid == os.getpid():
            _waiting = _Waiting(_wanted)


def take(engine: object, places: Sequence[Place], env: Mapping[str, str]) -> LocalRanks | None:
    """Return the waiting ranks if they are as those that `engine` would start for these places; None otherwise.

    Ranks that do not fit any more end, such as those that have used their GPU with other variables. `env` are further
    variables for the ranks, on top of this process's environment.
    """
    global _waiting
    with _lock:
        found = _waiting
        if found is None or not isinstance(engine, LocalEngine) or _wanted is None or _wanted.pid != os.getpid():
            return None
        if found.places != places:
            return None
        _waiting = None
        if found.fit(engine, env):
            return found.take()
        found.close()
        return None


def stop() -> None:
    """End the waiting ranks."""
    global _waiting, _wanted
    with _lock:
        found, _waiting, _wanted = _waiting, None, None
        if found is not None:
            found.close()


def _read_at_first_use(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_FIRST_USE)}


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork)

"""The start of a context's processes: a `Process` object is pickled and sent to a fork of the server."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from ...capture import messages, reading
from ...capture.call import Call, capture_call
from ...engines.forkserver import remove_if_killed
from ...system.cores import usable_cores
from ...system.processes import own_pidfd, register_after_fork
from ...wire import protocol
from ...wire.cache import SentCache
from ...wire.messages import ProcessStart
from ..cell.cell import Cell
from .processes import Role, Running, process_reader

#: What the server imports of a library, since every process needs it.
_PARTS = ("context", "connection", "pool", "popen_fork", "queues", "resource_tracker", "spawn", "synchronize", "util")


class Starter:
    """The starter of processes of a library's context."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.roles: weakref.WeakKeyDictionary[Any, Role] = weakref.WeakKeyDictionary()
        """The roles of `Process` objects that will work for a pool."""
        self.deaths = 0
        """The processes that have not ended by themselves so far."""
        self._cache = SentCache()
        self._left = 0  # processes that run
        self._capturing = threading.RLock()  # pools start processes in a thread of theirs
        self._modules = [f"{library}.{part}" for part in _PARTS]
        self._make_pickler = functools.partial(messages.MessagePickler, library)
        register_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock in a child of this process: another thread may have held it."""
        self._capturing = threading.RLock()

    def capture(self, fn: Callable[..., Any], *args: Any) -> Call:
        """Capture a function and its arguments as a call; big data that was sent before is shared."""
        with self._capturing:
            return capture_call(fn, args, {}, "", {}, self._cache, make_pickler=self._make_pickler)

    def start(self, process: Any, descriptors: list[int]) -> Running:
        """Start the process of a `Process` object; pickling the object adds to the `descriptors` to send."""
        role = self.roles.pop(process, None) or Role(Cell(background=True))
        try:
            running = self._start(process, descriptors, role)
        except Exception:
            if role.is_lost():  # and its queues are closed
                raise SystemExit from None  # ends the pool's thread that replaces workers, without a traceback
            raise
        if role.is_lost():  # after the other workers were killed
            running.kill()
        return running

    def _start(self, process: Any, descriptors: list[int], role: Role) -> Running:
        messages.install_for_joblib()
        trackers = self._trackers()
        # Or each process would make its own, and leave it behind where it is killed. This one travels with the process.
        process._config["tempdir"] = folder = importlib.import_module(f"{self.library}.util").get_temp_dir()
        remove_if_killed(folder)
        start = ProcessStart(
            library=self.library,
            preparation=self._preparation(process.name),
            threads=max(1, len(usable_cores()) // role.processes),
            seeds=_seeds(process._identity[-1]),
            trackers=list(trackers),
            worker=role.worker,
        )
        call = self.capture(reading.nothing, process, messages.registered(self.library))
        with contextlib.closing(call.parcel), own_pidfd() as kernel:
            running = Running(
                process.name,
                [*self._modules, *sorted(call.modules)],
                role=role,
                on_exit=self._ended,
            )
            parent = kernel if kernel >= 0 else running.sentinel
            for part in messages.fits([*trackers.values(), parent, *descriptors]):
                running.send(protocol.Descriptors(), fds=part)
            running.send(protocol.Process(running.setting(), start, call.header), parcel=call.parcel)
        with self._capturing:
            self._left += 1
        process_reader.add(running)
        return running

    def _preparation(self, name: str) -> dict[str, Any]:
        """Return the argument of the library's `spawn.prepare`. It has no `__main__`, because functions are sent by
        value without the notebook's file. It has no start method, because the process forks its own processes."""
        process, util = (importlib.import_module(f"{self.library}.{part}") for part in ("process", "util"))
        preparation = {
            "name": name,
            "authkey": bytes(process.current_process().authkey),  # of its own class it would refuse to be pickled
            "orig_dir": process.ORIGINAL_DIR,
            "log_to_stderr": util._log_to_stderr,
        }
        if util._logger is not None:
            preparation["log_level"] = util._logger.getEffectiveLevel()
        return preparation

    def _trackers(self) -> dict[str, int]:
        """Start the resource trackers of this process for this library, and return a descriptor for each."""
        importlib.import_module(f"{self.library}.resource_tracker").ensure_running()
        modules = {name: sys.modules.get(f"{name}.resource_tracker") for name in ("multiprocessing", "multiprocess")}
        fds = {name: module._resource_tracker._fd for name, module in modules.items() if module is not None}
        return {name: fd for name, fd in fds.items() if fd is not None}

    def _ended(self, running: Running) -> None:
        if running.status != 0 and not running.asked_to_end:
            self.deaths += 1
        running.role.on_exit(running)
        with self._capturing:
            self._left -= 1
            if not self._left:  # no process shares data with what was sent
                self._cache.close()


def _seeds(number: int) -> tuple[int, int, int]:
    """Return seeds for `random`, NumPy and torch in the process with this number.

    The seeds depend on the notebook's random state but do not change it, because results of a notebook must not depend
    on the number of a loader's workers.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    for_random = abs(hash(random.getstate()))
    for_numpy = for_random if numpy is None else zlib.crc32(numpy.random.get_state()[1].tobytes())
    for_torch = for_random if torch is None else zlib.crc32(torch.get_rng_state().numpy().tobytes())
    return for_random + number, for_numpy + number, for_torch + number

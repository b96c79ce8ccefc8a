"""`nbdist.context`: `multiprocessing` and `multiprocess` with processes that come from the warm server."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import queue
import random
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from .. import engines
from ..capture import messages, reading
from ..capture.call import Call, capture_call
from ..cores import usable_cores
from ..engines.local import LocalEngine
from ..errors import NbdistError
from ..wire.cache import SentCache
from ..wire.messages import ProcessStart
from ..wire.processes import forget_in_children, own_pidfd
from .arguments import check_platform
from .cell import Cell
from .pools import make_pool
from .processes import Role, Running, follow_cells, hearing, heed_interrupts

#: What the server imports of a library, since every process needs it.
_PARTS = ("context", "connection", "pool", "popen_fork", "queues", "resource_tracker", "spawn", "synchronize", "util")
#: What `spawn.prepare` is not told: functions come by value, so nobody needs the notebook's file, and what a process
#: starts itself is forked.
_NOT_PREPARED = ("init_main_from_name", "init_main_from_path", "start_method")
#: Seconds from one look at the processes to the next, while a queue is waited for.
_LOOK = 0.2


def context(package: str = "multiprocess") -> Any:
    """A context of `multiprocess` or `multiprocessing` whose processes come from the warm server, not from the kernel.

    It has what every such context has: `Process`, `Pool`, `Queue`, `Pipe`, `Event`, `Lock`, `Value`, `Manager` and so on,
    with the package's own code behind them. Functions, classes and values of cells are pickled as for `in_ddp`, both as
    arguments and in messages. What the processes write appears in the cell that started them; an interrupt of the
    notebook reaches them; they end with the kernel. A pool whose worker has died raises `WorkerDied`.

    Args:
        package: "multiprocess", which `pip install "nbdist[multiprocess]"` brings, or "multiprocessing": the standard
            library's, which `torch.utils.data.DataLoader(multiprocessing_context=...)` and
            `concurrent.futures.ProcessPoolExecutor(mp_context=...)` take.

    Raises:
        ValueError: For another package.
        NbdistError: Where `multiprocess` is not installed.
        NotImplementedError: On Windows.

    Examples:
        >>> scale = 10
        >>> def scaled(x):
        ...     return scale * x
        >>> with context().Pool(2) as pool:
        ...     pool.map(scaled, range(4))
        [0, 10, 20, 30]
    """
    check_platform()
    if package not in ("multiprocess", "multiprocessing"):
        raise ValueError(f"package={package!r}: 'multiprocess' or 'multiprocessing'")
    if importlib.util.find_spec(package) is None:
        raise NbdistError(
            'multiprocess is not installed: pip install "nbdist[multiprocess]", or use the standard library\'s: '
            'nbdist.context("multiprocessing")'
        )
    if not isinstance(engines.resolve(None), LocalEngine):
        Cell().notice("the processes of a context run on this machine, not on the cluster; parallel_map runs there")
    made = _make(package)
    messages.install(package)
    heed_interrupts()
    follow_cells()
    return made


class Starter:
    """Starts the processes of a library's context."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.roles: weakref.WeakKeyDictionary[Any, Role] = weakref.WeakKeyDictionary()
        """Of `Process` objects that are to work for a pool."""
        self.deaths = 0
        """Processes that have not ended by themselves, so far."""
        self._cache = SentCache()
        self._left = 0  # processes that run
        self._capturing = threading.RLock()  # pools start processes in a thread of theirs
        self._modules = [f"{library}.{part}" for part in _PARTS]
        self._make_pickler = functools.partial(messages.MessagePickler, library)
        forget_in_children(self)

    def after_fork(self) -> None:
        """In a child of this process: another thread may have held this."""
        self._capturing = threading.RLock()

    def capture(self, fn: Callable[..., Any], *args: Any) -> Call:
        """A function and its arguments, as a call; big data are shared with what was sent before."""
        with self._capturing:
            return capture_call(fn, args, {}, "", {}, self._cache, make_pickler=self._make_pickler)

    def start(self, process: Any, descriptors: list[int]) -> Running:
        """Start what a `Process` describes; pickling it adds to the `descriptors` that it is to have."""
        role = self.roles.pop(process, None) or Role(Cell(background=True))
        spawn = importlib.import_module(f"{self.library}.spawn")
        tracker = importlib.import_module(f"{self.library}.resource_tracker").getfd()
        preparation = {k: v for k, v in spawn.get_preparation_data(process.name).items() if k not in _NOT_PREPARED}
        preparation["authkey"] = bytes(preparation["authkey"])  # of its own class it would refuse to be pickled
        start = ProcessStart(
            library=self.library,
            preparation=preparation,
            threads=max(1, len(usable_cores()) // role.processes),
            seeds=_seeds(process._identity[-1]),
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
            for part in messages.fits([tracker, parent, *descriptors]):
                running.send("descriptors", fds=part)
            running.send("process", running.setting(), start, call.header, parcel=call.parcel)
        with self._capturing:
            self._left += 1
        hearing.add(running)
        return running

    def _ended(self, running: Running) -> None:
        if running.status != 0 and not running.asked_to_end:
            self.deaths += 1
        running.role.on_exit(running)
        with self._capturing:
            self._left -= 1
            if not self._left:  # nobody shares data with what was sent
                self._cache.close()


def _seeds(number: int) -> tuple[int, int, int]:
    """Seeds for `random`, NumPy and torch in the process of this number.

    They follow from the notebook's own random state, which stays as it is: what a notebook computes must not depend on
    the number of a loader's workers.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    for_random = abs(hash(random.getstate()))
    for_numpy = for_random if numpy is None else zlib.crc32(numpy.random.get_state()[1].tobytes())
    for_torch = for_random if torch is None else zlib.crc32(torch.get_rng_state().numpy().tobytes())
    return for_random + number, for_numpy + number, for_torch + number


@functools.cache
def _make(library: str) -> Any:
    """The context of a library, and the classes that it is made of.

    In the processes themselves their places are taken by the library's own, of its `fork` method: those are clean.
    """
    base: Any = {
        name: importlib.import_module(f"{library}.{name}")
        for name in ("connection", "context", "pool", "popen_fork", "process", "queues", "util")
    }
    starter = Starter(library)

    class Popen(base["popen_fork"].Popen):
        method = "nbdist"
        DupFd = messages.Inherited

        def __init__(self, process: Any) -> None:
            self._descriptors: list[int] = []
            super().__init__(process)

        def duplicate_for_child(self, fd: int) -> int:
            self._descriptors.append(fd)
            return len(self._descriptors) - 1

        def _launch(self, process: Any) -> None:
            base["context"].set_spawning_popen(self)
            try:
                self._running = starter.start(process, self._descriptors)
            finally:
                base["context"].set_spawning_popen(None)
            self.sentinel = self._running.sentinel
            self.finalizer = base["util"].Finalize(self, os.close, (self.sentinel,))
            self.pid = self._running.pid

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            if self.returncode is None and base["connection"].wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                self.returncode = self._running.status
            return self.returncode

        def _send_signal(self, sig: int) -> None:
            if self.returncode is None:
                self._running.asked_to_end = True
                self._running.signal(sig)

    class NbdistProcess(base["process"].BaseProcess):
        _start_method = None
        in_processes = base["context"].ForkProcess

        @staticmethod
        def _Popen(process: Any) -> Any:
            return Popen(process)

    class Queue(base["queues"].Queue):
        in_processes = base["queues"].Queue

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._deaths = starter.deaths

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            """As the library's, but a wait for a time ends when a process has died: loaders look at their workers
            then."""
            if not block or timeout is None:
                return super().get(block, timeout)
            deadline = time.monotonic() + timeout
            while True:
                try:
                    return super().get(True, max(0.0, min(_LOOK, deadline - time.monotonic())))
                except queue.Empty:
                    deaths, self._deaths = self._deaths, starter.deaths
                    if deaths != self._deaths or time.monotonic() >= deadline:
                        raise

    class NbdistContext(base["context"].BaseContext):
        _name = "nbdist"
        Process = NbdistProcess

        def Queue(self, maxsize: int = 0) -> Any:
            return Queue(maxsize, ctx=self)

        def Pool(self, *args: Any, **options: Any) -> Any:
            return pool(*args, **options, context=self)

        def __reduce__(self) -> tuple[Any, ...]:
            return importlib.import_module(library).get_context, ("fork",)

    pool = make_pool(base["pool"], starter)
    return NbdistContext()

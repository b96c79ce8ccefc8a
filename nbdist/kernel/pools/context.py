"""`nbdist.context`: `multiprocessing` and `multiprocess` with processes from the fork server."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import queue
import time
from typing import Any

from ... import engines
from ...capture import messages
from ...checks import check_choice
from ...errors import NbdistError, entry
from ..calls.arguments import check_platform
from ..cell.cell import Cell
from .pool import make_pool
from .processes import follow_cells, watch_interrupts
from .starting import Starter

#: Seconds from one look at the processes to the next, while a queue is waited for.
_LOOK = 0.2
#: Seconds within which the death of a process is known here.
_PATIENCE = 1.0


@entry
def context(package: str = "multiprocess") -> Any:
    """Return a context of `multiprocess` or `multiprocessing` whose processes come from the fork server.

    It has the attributes of every context (`Process`, `Pool`, `Queue`, `Pipe`, `Event`, `Lock`, `Value`, `Manager` and
    so on), with the package's own code. Nothing is forked from the kernel. Functions, classes and values of cells are
    pickled as for `in_ddp`, as arguments and in messages. Output of the processes appears in the cell that started
    them. An interrupt of the notebook reaches them, and they end with the kernel. A pool that has lost a worker raises
    `WorkerDied`. After the first call, `get_context("nbdist")` of the package returns the same context.

    Args:
        package: "multiprocess", which `pip install "nbdist[multiprocess]"` brings, or "multiprocessing": the standard
            library's, which `torch.utils.data.DataLoader(multiprocessing_context=...)` and
            `concurrent.futures.ProcessPoolExecutor(mp_context=...)` take.

    Raises:
        ValueError: For another package.
        NbdistError: `multiprocess` is not installed.
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
    check_choice(package, ("multiprocess", "multiprocessing"), name="package")
    if importlib.util.find_spec(package) is None:
        raise NbdistError(
            'multiprocess is not installed: pip install "nbdist[multiprocess]", or use the standard library\'s: '
            'nbdist.context("multiprocessing")'
        )
    if not engines.resolve(None).local:
        Cell().notice("the processes of a context run on this machine, not on the cluster; parallel_map runs there")
    made = _make(package)
    messages.install(package)
    watch_interrupts()
    follow_cells()
    return made


@functools.cache
def _make(library: str) -> Any:
    """Make the context of a library, and its classes.

    In the processes themselves the library's own classes of its `fork` method are used: these processes are safe to
    fork.
    """
    base: Any = {
        name: importlib.import_module(f"{library}.{name}")
        for name in ("connection", "context", "pool", "popen_fork", "process", "queues", "util")
    }
    starter = Starter(library)

    class Popen(base["popen_fork"].Popen):  # type: ignore[misc]
        method = "nbdist"
        DupFd = messages.Inherited

        def __init__(self, process: Any) -> None:
            self.returncode: Any = None
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

        def poll(self, flag: int = os.WNOHANG) -> Any:
            if self.returncode is None and base["connection"].wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                self.returncode = self._running.status
            return self.returncode

        def _send_signal(self, sig: int) -> None:
            if self.returncode is None:
                self._running.asked_to_end = True
                self._running.signal(sig)

    class NbdistProcess(base["process"].BaseProcess):  # type: ignore[misc]
        _start_method = None
        in_processes = base["context"].ForkProcess

        @staticmethod
        def _Popen(process: Any) -> Any:
            return Popen(process)

    class Queue(base["queues"].Queue):  # type: ignore[misc]
        in_processes = base["queues"].Queue

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._deaths: int = starter.deaths

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            """Get an item as the library does, but return early when a process has died, so that data loaders check
            their workers. Raises if the item was lost with its sender."""
            deadline = time.monotonic() + timeout if block and timeout is not None else math.inf
            while True:
                try:
                    return super().get(block, min(_LOOK, max(0.0, deadline - time.monotonic())) if timeout else timeout)
                except queue.Empty:
                    if not block or self._news() or time.monotonic() >= deadline:
                        raise
                except (EOFError, OSError):
                    patience = time.monotonic() + _PATIENCE
                    while not self._news() and time.monotonic() < patience:
                        time.sleep(0.01)
                    raise

        def _news(self) -> bool:
            """Return whether a process has died since the last call."""
            before, self._deaths = self._deaths, starter.deaths
            return before != starter.deaths

    class NbdistContext(base["context"].BaseContext):  # type: ignore[misc]
        _name = "nbdist"
        Process = NbdistProcess

        def Queue(self, maxsize: int = 0) -> Any:
            return Queue(maxsize, ctx=self)

        def Pool(self, *args: Any, **options: Any) -> Any:
            return pool(*args, **options, context=self)

        def __reduce__(self) -> tuple[Any, ...]:
            return importlib.import_module(library).get_context, ("fork",)

    pool = make_pool(base["pool"], starter)
    made = NbdistContext()
    base["context"]._concrete_contexts["nbdist"] = made  # for those who take a start method by its name
    return made

"""The classes by which a context of `multiprocessing`, or of `multiprocess`, uses the warm server.

Each class is a subclass of the library's own class, from which it inherits the rest. `make` builds all of them for one
library.
"""

from __future__ import annotations

import importlib
import math
import os
import queue
import time
from typing import Any

from ...capture import messages
from .pool import WarmPool
from .starting import Starter

#: Seconds from one look at the processes to the next, while a queue is waited for.
_LOOK = 0.2
#: Seconds within which the death of a process is known here.
_PATIENCE = 1.0

#: The library's class: it comes after each of these in the method resolution order.
_Own: Any = object


class Library:
    """The modules of `multiprocessing`, or of `multiprocess`, that these classes need.

    Args:
        name: The name of the package.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.connection, self.context, self.pool, self.popen_fork, self.process, self.queues, self.util = (
            importlib.import_module(f"{name}.{part}")
            for part in ("connection", "context", "pool", "popen_fork", "process", "queues", "util")
        )


class WarmPopen(_Own):
    """A running process, as `Process` holds it."""

    method = "nbdist"
    DupFd = messages.Inherited
    library: Library
    starter: Starter

    def __init__(self, process: Any) -> None:
        self.returncode: Any = None
        self._descriptors: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    def _launch(self, process: Any) -> None:
        self.library.context.set_spawning_popen(self)
        try:
            self._running = self.starter.start(process, self._descriptors)
        finally:
            self.library.context.set_spawning_popen(None)
        self.sentinel = self._running.sentinel
        self.finalizer = self.library.util.Finalize(self, os.close, (self.sentinel,))
        self.pid = self._running.pid

    def poll(self, flag: int = os.WNOHANG) -> Any:
        seconds = 0 if flag == os.WNOHANG else None
        if self.returncode is None and self.library.connection.wait([self.sentinel], seconds):
            self.returncode = self._running.status
        return self.returncode

    def _send_signal(self, sig: int) -> None:
        if self.returncode is None:
            self._running.asked_to_end = True
            self._running.signal(sig)


class WarmProcess(_Own):
    """A process that comes from the warm server."""

    _start_method = None
    popen: type[WarmPopen]

    @classmethod
    def _Popen(cls, process: Any) -> Any:
        return cls.popen(process)


class WarmQueue(_Own):
    """A queue whose reader learns of the death of processes."""

    starter: Starter

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deaths: int = self.starter.deaths

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
        before, self._deaths = self._deaths, self.starter.deaths
        return before != self.starter.deaths


class WarmContext(_Own):
    """A context whose processes come from the warm server."""

    _name = "nbdist"
    library: Library
    Process: type[WarmProcess]
    queue: type[WarmQueue]
    pool: type[WarmPool]

    def Queue(self, maxsize: int = 0) -> Any:
        return self.queue(maxsize, ctx=self)

    def Pool(self, *args: Any, **options: Any) -> Any:
        return self.pool(*args, **options, context=self)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module(self.library.name).get_context, ("fork",)


def make(name: str) -> WarmContext:
    """Make the context of the library of this name.

    In the processes themselves, the library's own classes for its start method `fork` are used, since these processes
    are safe to fork. `in_processes` is the name of that context.
    """
    library, starter = Library(name), Starter(name)
    own = {"library": library, "starter": starter}
    popen = type("Popen", (WarmPopen, library.popen_fork.Popen), own)
    process = type(
        "NbdistProcess",
        (WarmProcess, library.process.BaseProcess),
        {"popen": popen, "in_processes": library.context.ForkProcess},
    )
    queues = type("Queue", (WarmQueue, library.queues.Queue), {**own, "in_processes": library.queues.Queue})
    pool = type("Pool", (WarmPool, library.pool.Pool), {"library": library.pool, "starter": starter})
    parts = {"library": library, "Process": process, "queue": queues, "pool": pool}
    made: WarmContext = type("NbdistContext", (WarmContext, library.context.BaseContext), parts)()
    library.context._concrete_contexts["nbdist"] = made  # for those who take a start method by its name
    return made

"""A process of a context (`nbdist.context`): a fork of the server that does the work of a child of
`multiprocessing`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ..capture import messages
from ..errors import NbdistError
from ..wire import protocol
from ..wire.parcel import Parcel
from . import shell, streams
from .call import Caller
from .kernel_channel import KernelChannel
from .world import enter_setting, seed_everything, take_share

_FORKABLE = ("queues", "synchronize", "util")


class _Process:
    """The state of this process: its channel to the notebook, and a pool's functions if it is a worker."""

    def __init__(self, channel: KernelChannel, caller: Caller, name: str) -> None:
        self._channel, self._caller, self._name = channel, caller, name
        self._functions: dict[int, Callable[..., Any]] = {}
        self._pid = os.getpid()
        self._running = self._stopped = False

    def run(self, number: int, task: Callable[[Callable[..., Any]], Any]) -> Any:
        """Handle a function of the pool for which this process works."""
        if number not in self._functions:
            self._fetch(number)
        if self._stopped:
            raise KeyboardInterrupt
        self._running = True
        try:
            return task(self._functions[number])
        finally:
            self._running = False
            shell.after_call()

    def _fetch(self, number: int) -> None:
        if os.getpid() != self._pid:
            raise NbdistError("a function of a pool can be called only in the pool's workers, not in their children")
        self._channel.send(protocol.FunctionWanted(number))
        answer, parcel, _ = self._channel.receive()
        if not isinstance(answer, protocol.Function) or answer.header is None or parcel is None:
            raise NbdistError("the function's call is over")
        fn, _, _ = self._caller.take(answer.header, parcel, self._name)
        self._functions = {number: fn}  # the last one: it may hold much

    def enable_interrupts(self) -> None:
        """Make an interrupt end the running task, and later tasks, but not the worker's own code between tasks."""

        def on_interrupt(signum: int, frame: Any) -> None:
            self._stopped = True
            if self._running:
                self._running = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, on_interrupt)

    def returned(self) -> None:
        """Report to the notebook that the worker ends because it is done."""
        self._channel.send(protocol.Returned())


_this: _Process


def run(
    channel: KernelChannel, caller: Caller, request: protocol.Process, parcel: Parcel, descriptors: list[int]
) -> int:
    """Run the process in the parcel to its end, and return its exit code."""
    global _this
    setting, start, header = request
    name = f"{start.preparation['name']} (pid {os.getpid()})"
    _this = _Process(channel, caller, name)
    streams.keep_lines_whole()
    enter_setting(setting)
    take_share(start.threads)
    seed_everything(start.seeds)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    library = start.library
    _prepare_for_forks(library)
    for name in start.trackers:
        importlib.import_module(f"{name}.resource_tracker")._resource_tracker._fd = descriptors.pop(0)
    parent, *messages.inherited[:] = descriptors
    current = importlib.import_module(f"{library}.process").current_process()

    def received(key: str, namespace: dict[str, Any], name: str) -> bool:
        caller.sent.add((key, name))
        return True

    def has(key: str, name: str) -> bool:
        return start.worker and (key, name) in caller.sent

    messages.use_in_process(library, received, name, has)
    current._inheriting = True  # the library's own mark: what is read now counts as the parent's
    try:
        importlib.import_module(f"{library}.spawn").prepare(start.preparation)
        _, (process, registered), _ = caller.take(header, parcel, name)
        messages.register(library, registered)
    finally:
        del current._inheriting
    try:
        return int(process._bootstrap(parent_sentinel=parent))
    finally:
        shell.after_call()


def _prepare_for_forks(library: str) -> None:
    """Make queues and locks that were received in a pickle work in processes that this process forks.

    The library does so only when a lock or queue is made, and assumes that objects from a pickle are sent by pickle
    again.
    """
    queues, synchronize, util = (importlib.import_module(f"{library}.{part}") for part in _FORKABLE)
    forked: list[tuple[Any, Callable[[Any], None]]] = [
        (queues.Queue, queues.Queue._after_fork),
        (synchronize.SemLock, lambda lock: lock._semlock._after_fork()),
    ]
    for cls, after_fork in forked:

        def set_state(self: Any, state: Any, before: Any = cls.__setstate__, after_fork: Any = after_fork) -> None:
            before(self, state)
            util.register_after_fork(self, after_fork)

        cls.__setstate__ = set_state


def work(worker: Callable[..., None], *args: Any) -> None:
    """Run the library's `worker` in a worker of a pool, until it is asked to end or is interrupted."""
    _this.enable_interrupts()
    try:
        worker(*args)
    except KeyboardInterrupt:
        sys.exit(1)
    _this.returned()


class PoolFunction:
    """A function of a pool in messages: a number, with which a worker requests the function from the notebook, once."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _this.run(self.number, lambda fn: fn(*args, **kwargs))


class PoolMapper:
    """The mapper of a chunk of items: like the library's own `mapper`, but with the function itself."""

    def __init__(self, mapper: Callable[[tuple[Any, Any]], Any]) -> None:
        self._mapper = mapper

    def __call__(self, chunk: tuple[PoolFunction, Any]) -> Any:
        fn, items = chunk
        return _this.run(fn.number, lambda own: self._mapper((own, items)))

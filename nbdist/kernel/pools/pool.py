"""`multiprocessing.Pool` over processes of a context: functions are sent once, and a lost worker raises an
exception."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...capture.call import Call
from ...rank.process import PoolFunction, PoolMapper, work
from ..cell.cell import Cell
from .processes import Role, Running, process_reader
from .starting import Starter

_numbers = itertools.count(1)


#: The library's own class.
_Own: Any = object


class WarmPool(_Own):
    """A pool of workers from the warm server. The library's `Pool` comes after it in the method resolution order."""

    library: ModuleType
    """The library's module with its `Pool`."""
    starter: Starter

    def __init__(self, *args: Any, **options: Any) -> None:
        self._calls: dict[int, Call] = {}
        self._jobs: dict[int, set[int]] = {}  # by the number of a function: the jobs that need it
        self._cell = Cell(background=True)
        self._lost: Exception | None = None
        self._failing = threading.Lock()
        self._early: list[Running] | None = []
        """The workers that have ended before the pool was made; None: it is made."""
        # The library hands this to a thread of its own, which must not keep the pool.
        self.Process = functools.partial(_worker, weakref.ref(self), self.starter)
        super().__init__(*args, **options)
        weakref.finalize(self, _close, self._calls)
        with self._failing:
            early, self._early = self._early, None
        for running in early:
            self._on_exit(running)

    # ------------------------------------------------------------------------------------------ functions

    def apply_async(self, func: Any, args: Any = (), kwds: Any = {}, *callbacks: Any, **options: Any) -> Any:  # noqa: B006
        return self._submit(func, lambda fn: super(WarmPool, self).apply_async(fn, args, kwds, *callbacks, **options))

    def _map_async(self, func: Any, items: Any, mapper: Any, *args: Any, **options: Any) -> Any:
        mapper = PoolMapper(mapper)
        return self._submit(func, lambda fn: super(WarmPool, self)._map_async(fn, items, mapper, *args, **options))

    def imap(self, func: Any, *args: Any, **options: Any) -> Any:
        return self._submit(func, lambda fn: super(WarmPool, self).imap(fn, *args, **options))

    def imap_unordered(self, func: Any, *args: Any, **options: Any) -> Any:
        return self._submit(func, lambda fn: super(WarmPool, self).imap_unordered(fn, *args, **options))

    def _submit(self, func: Any, submit: Callable[[Any], Any]) -> Any:
        self._check_running()
        if not callable(func):
            raise TypeError(f"func must be a function, got {func!r}")
        self._show(Cell(background=True))
        self._forget_done()
        number = next(_numbers)
        self._calls[number] = self.starter.capture(func)
        before = set(self._cache)
        try:
            return submit(PoolFunction(number))
        finally:
            self._jobs[number] = set(self._cache) - before
            self._check_lost()

    def _forget_done(self) -> None:
        for number in [number for number, jobs in self._jobs.items() if not jobs & self._cache.keys()]:
            del self._jobs[number]
            self._calls.pop(number).parcel.close()

    def apply(self, *args: Any, **options: Any) -> Any:
        return self._shown(super().apply, *args, **options)

    def map(self, *args: Any, **options: Any) -> Any:
        return self._shown(super().map, *args, **options)

    def starmap(self, *args: Any, **options: Any) -> Any:
        return self._shown(super().starmap, *args, **options)

    def _shown(self, action: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return action(*args, **options)
        finally:
            self._show()
            self._forget_done()

    def _show(self, cell: Cell | None = None) -> None:
        self._cell = cell or self._cell
        for running in _workers(self):
            running.show(cell)

    # --------------------------------------------------------------------------------------------- deaths

    def _check_running(self) -> None:
        if self._lost is not None:
            raise self._lost
        super()._check_running()

    def _check_lost(self) -> None:
        """Check for a lost worker after a job was submitted: the loss may have happened before."""
        if self._lost is not None:
            self._fail()

    def _on_exit(self, running: Running) -> None:
        """Handle the end of a worker. Unless it was done, its task is lost, and perhaps a lock of the queues."""
        with self._failing:
            if self._early is not None:
                self._early.append(running)
                return
        if running.returned or running.asked_to_end or self._state == self.library.TERMINATE:
            return
        if self._lost is None:
            self._lost = running.died()
        self._worker_handler._state = self.library.TERMINATE  # no worker in its place
        for other in _workers(self):
            if other is not running:
                other.kill()
        # It may have died in the middle of a message: now whoever reads or writes there comes to the end; and
        # `_terminate_pool`, which may come at any moment, sees it.
        self._outqueue._writer.close()
        self._fail()  # before a task that cannot be written does, with a broken pipe
        self._inqueue._reader.close()
        self._fail()  # what was submitted meanwhile

    @classmethod
    def _terminate_pool(
        cls, taskqueue: Any, inqueue: Any, outqueue: Any, workers: Any, change_notifier: Any, *more: Any
    ) -> None:
        if not outqueue._writer.closed:
            super()._terminate_pool(taskqueue, inqueue, outqueue, workers, change_notifier, *more)
            return
        *threads, _ = more  # not as the library does it: a dead worker may hold the locks that it takes for that
        for thread in threads:
            thread._state = cls.library.TERMINATE
        change_notifier.put(None)
        taskqueue.put(None)
        for worker in list(workers):
            if worker.pid is not None:
                worker.join()
        if outqueue._wlock._semlock._is_zero():
            outqueue._wlock.release()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _fail(self) -> None:
        with self._failing:
            for result in list(self._cache.values()):
                _set_failed(result, self._lost)


def _worker(pool_ref: weakref.ref[Any], starter: Starter, ctx: Any, **options: Any) -> Any:
    """Make the `Process` object of a worker."""
    pool = pool_ref()
    target, args = options.pop("target"), options.pop("args")
    process = ctx.Process(target=work, args=(target, *args), **options)
    if pool is not None:
        starter.roles[process] = Role(
            pool._cell,
            processes=pool._processes,
            worker=True,
            functions=pool._calls,
            busy=functools.partial(_is_busy, pool_ref),
            is_lost=functools.partial(_is_lost, pool_ref),
            on_exit=functools.partial(_on_exit, pool_ref),
            owner=pool_ref,
        )
    return process


def _workers(pool: Any) -> list[Running]:
    return [
        running
        for running in process_reader.processes()
        if running.role.owner is not None and running.role.owner() is pool
    ]


def _is_busy(pool_ref: weakref.ref[Any]) -> bool:
    pool = pool_ref()
    return pool is not None and bool(pool._cache)


def _is_lost(pool_ref: weakref.ref[Any]) -> bool:
    pool = pool_ref()
    return pool is not None and pool._lost is not None


def _on_exit(pool_ref: weakref.ref[Any], running: Running) -> None:
    pool = pool_ref()
    if pool is not None:
        pool._on_exit(running)


def _set_failed(result: Any, error: Exception | None) -> None:
    """Make a result of a pool raise `error` now."""
    outcome = False, error
    if hasattr(result, "_cond"):  # an iterator: what it has comes first
        with result._cond:
            result._items.append(outcome)
            result._length = result._index
            result._cond.notify_all()
        with contextlib.suppress(KeyError):
            del result._cache[result._job]
        return
    with contextlib.suppress(KeyError):  # it has just got what it waited for
        if hasattr(result, "_number_left"):
            result._number_left = 1
        result._set(0, outcome)


def _close(calls: dict[int, Call]) -> None:
    for call in calls.values():
        call.parcel.close()

"""`parallel_map`: a function of the notebook over many items, on all cores."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import reprlib
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ... import engines
from ...capture.call import Call, capture_call
from ...capture.depth import with_large_stack
from ...capture.diagnosis import explain_failure
from ...capture.imports import modules_named
from ...capture.need import Names, given_names
from ...capture.per_rank import Spread
from ...capture.pickler import Pickler, dumps_plain
from ...checks import check_count, check_flag, shown
from ...engines.contract import Exit, Listening, Ranks
from ...errors import CaptureError, RemoteTraceback, WorkerDied, entry, text_of
from ...system.cores import usable_cores
from ...system.free_memory import MeasuredFile
from ...system.interrupts import NUDGE, NUDGES, deferred_interrupts, interruptible
from ...wire import protocol
from ...wire.board import Board
from ...wire.cache import KEPT, SentCache
from ...wire.parcel import Parcel, pack
from ..calls import notices
from ..calls.arguments import check_call, check_platform, check_takes
from ..calls.ending import GRACE_AFTER_FAILURE, GRACE_AFTER_INTERRUPT
from ..calls.group import GRACE_TO_LEAVE
from ..calls.outcomes import load, rebuild
from ..calls.requests import draw_seeds
from ..calls.waiting import AT_A_TIME, OUTPUT_INTERVAL
from ..cell.cell import Cell
from ..cell.relay import Relay

R = TypeVar("R")

#: Seconds that a worker should be busy with what it is sent at once: sending is little compared to it, and no worker
#: has much left to do when the others are done.
_BUSY = 0.05
#: Chunks that a worker has at a time: one that it works on, and the next.
_AHEAD = 2
_ITEMS = "the items that a worker gets at once"


@entry
def parallel_map(
    fn: Callable[..., R],
    items: Iterable[Any],
    *more: Any,
    workers: int | None = None,
    imports: str | Iterable[str] = "",
    need: Names = "",
    progress: bool = True,
    chunk: int | None = None,
) -> list[R]:
    """Return `list(map(fn, items))`, computed on all cores.

    The workers are fresh processes from the fork server, or on the cluster of `nbdist.use`. Functions, classes and
    variables of the notebook that `fn` uses are sent once; big arrays, tensors and frames are shared and not copied.
    Output of the workers appears in the cell. The first exception ends the call, and so does the stop button.

    Args:
        fn: A function of one argument: of the notebook, of a script, or of a package.
        items: The items. Each is the argument of a call.
        more: Further iterables, for a function of several arguments: each call gets an item of each iterable, as with
            `map`, until the shortest ends. An integer as the last argument is `workers`.
        workers: The number of processes. None: one for each core that this process may use; on a cluster, a number is
            needed.
            0 calls `fn` in this process, for `%debug` and breakpoints.
        imports: Import statements, executed in each worker's `__main__` before `fn`.
        need: Further names of notebook variables to send: a string, a list, or a mapping name → value.
        progress: Whether to show a progress bar, if tqdm is installed.
        chunk: The number of items that a worker gets at once. None: as many as take some hundredths of a second.

    Returns:
        The values of `fn`, in the order of the items.

    Raises:
        TypeError, ValueError, NameError, CaptureError: An argument is invalid, a name is unknown, or an object cannot
            be pickled.
        WorkerDied: A worker's process has ended without an answer. The error names the item.
        BaseException: The exception of `fn`; the cause is the traceback in the worker, with the item.

    Examples:
        >>> scale = 10
        >>> def scaled(x):
        ...     return scale * x
        >>> parallel_map(scaled, range(4), progress=False)
        [0, 10, 20, 30]
        >>> parallel_map(pow, [2, 3], [3, 2], workers=2, progress=False)
        [8, 9]
    """
    check_platform()
    if more and (isinstance(more[-1], int) or not isinstance(more[-1], Iterable)):
        *more, workers = more  # type: ignore[assignment]
    block, names = check_call(fn, imports, need)
    if workers is not None:
        check_count(workers, least=0, name="workers")
    if chunk is not None:
        check_count(chunk, least=1, name="chunk")
    check_flag(progress, name="progress")
    if not isinstance(items, Iterable):
        raise TypeError(f"items must be a list or another iterable, got {shown(items)}")
    for one in more:
        if not isinstance(one, Iterable):
            raise TypeError(f"each of the further iterables must be a list or another iterable, got {shown(one)}")
    items = list(zip(items, *more, strict=False) if more else items)
    if items:
        check_takes(fn, items[0] if more else items[:1], {})
    fn = Spread(fn) if more else fn
    with _bar(len(items), progress) as advance:
        if workers == 0:
            return _here(fn, items, block, names, advance)
        if not items:
            return []
        engine = engines.resolve(None)
        if workers is None and not engine.local:
            raise ValueError("workers must be a number on a cluster, got None")
        with contextlib.closing(SentCache()) as cache:
            call = capture_call(fn, (), {}, block, names, cache)
            with contextlib.closing(call.parcel):
                count = min(workers or len(usable_cores()), len(items))
                modules = [*modules_named(block), *sorted(call.modules)]
                ranks = engine.start_workers(count, modules, Cell().notice)
                try:
                    mapping = _Map(call, items, ranks, chunk, cache, advance)
                except BaseException:  # an interrupt, or no shared memory is left
                    ranks.close()
                    raise
                with contextlib.closing(mapping):
                    return mapping.run()


def _here(fn: Callable[..., R], items: list[Any], block: str, names: Mapping[str, Any], advance: Any) -> list[R]:
    """Compute the values in this process, without workers."""
    values = []
    with given_names(block, names):
        for item in items:  # not `map`: a StopIteration of `fn` would be its end
            values.append(fn(item))
            advance(1)
    return values


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int], object]]:
    """Return a function that advances a progress bar by a number of items."""
    if not (wanted and total and importlib.util.find_spec("tqdm")):
        yield lambda count: None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no widgets: then the bar is text
        auto: Any = importlib.import_module("tqdm.auto")
    with auto.tqdm(total=total) as bar:
        yield bar.update


class _Chunk(NamedTuple):
    start: int
    stop: int


class _Map:
    """A call of `parallel_map`: the workers, the items of each, and the values that have arrived."""

    def __init__(
        self,
        call: Call,
        items: list[Any],
        ranks: Ranks,
        chunk: int | None,
        cache: SentCache,
        advance: Callable[[int], Any],
    ) -> None:
        self._call, self._items, self._chunk, self._cache, self._advance = call, items, chunk, cache, advance
        self._known = {id(obj): number for number, obj in enumerate(call.originals)}
        self._values: list[Any] = [None] * len(items)
        self._next = 0  # the first item that no worker has
        self._seconds = 0.0  # that an item takes, as far as is known
        self._error: BaseException | None = None
        self._ranks, self._relay = ranks, Relay(ranks)
        self._has: list[deque[_Chunk]] = [deque() for _ in ranks.pids]
        self._board = Board.create(len(self._has))
        self._late_at = time.monotonic() + notices.LONG_START

    def run(self) -> list[Any]:
        """Return the values. Raises the first failure, or `KeyboardInterrupt`."""
        self._relay.begin(Cell(), "lines", 0)
        self._work()
        return self._values

    def close(self) -> None:
        """End the workers. Workers that have nothing to do end as ranks do: they write their files."""
        with contextlib.closing(self._board):
            self._ranks.close(0.0 if any(self._has) else GRACE_TO_LEAVE, self._relay.take_last)
            self._relay.flush()
            self._relay.cell.close()

    def _work(self) -> None:
        """Send the items to the workers, and receive the values."""
        listener = self._ranks.listen(
            on_output=self._relay.take,
            on_message=self._on_message,
            on_exit=self._on_exit,
            pause=OUTPUT_INTERVAL,
        )
        with contextlib.closing(listener), interruptible():
            try:
                self._begin()
                while self._error is None and (self._next < len(self._items) or any(self._has)):
                    listener.select(AT_A_TIME)
                    self._relay.show_unfinished()
                    self._say_if_late()
            except BaseException as exc:
                self._let_finish(listener, GRACE_AFTER_INTERRUPT)
                raise exc from None
            if self._error is not None:
                self._let_finish(listener, GRACE_AFTER_FAILURE)
                raise self._error
            self._relay.drain()

    def _say_if_late(self) -> None:
        if time.monotonic() > self._late_at and (said := notices.not_started(self._ranks)):
            self._late_at = math.inf
            self._relay.cell.notice(said)

    def _begin(self) -> None:
        environ, seeds = self._ranks.inherited(), draw_seeds()
        board = [self._board.segment.fd] if self._ranks.takes_descriptors else []
        for worker in range(len(self._has)):
            own = [seed + worker for seed in seeds]
            setting, threads = self._ranks.setting(worker, environ), self._ranks.slots[worker].threads
            message = protocol.Begin(worker, len(self._has), setting, threads, own, self._call.header)
            self._send(worker, message, parcel=self._call.parcel, fds=board)
        for _ in range(_AHEAD):
            for worker in range(len(self._has)):
                self._give(worker)

    def _send(self, worker: int, message: protocol.ToRank, **parts: Any) -> None:
        with contextlib.suppress(ConnectionError):  # it is dead: that is noticed otherwise
            self._ranks.send(worker, message, **parts)

    def _give(self, worker: int) -> None:
        """Send more items to a worker, if any are left."""
        if self._next == len(self._items):
            return
        chunk = _Chunk(self._next, min(self._next + self._size(), len(self._items)))
        parcel = self._pack(chunk)
        with deferred_interrupts(), contextlib.closing(parcel):
            self._next = chunk.stop
            self._has[worker].append(chunk)
            self._send(worker, protocol.Items(chunk.start), parcel=parcel)

    def _size(self) -> int:
        if self._chunk is not None:
            return self._chunk
        if not self._seconds:
            return 1
        fair = -(-(len(self._items) - self._next) // (len(self._has) * _AHEAD))
        return max(1, min(int(_BUSY / self._seconds), fair))

    def _pack(self, chunk: _Chunk) -> Parcel:
        items = self._items[chunk.start : chunk.stop]
        plain = dumps_plain(items)
        if plain is not None:
            return pack(plain, [])

        def write() -> Pickler:
            file, has = MeasuredFile(_ITEMS), self._call.names
            pickler = Pickler(file, known=self._known, skip=lambda key, name: (key, name) in has, least=KEPT)
            pickler.dump(items)
            return pickler

        try:
            pickler = with_large_stack(write)
        except Exception as exc:
            raise explain_failure(
                exc, {f"items[{number}]": item for number, item in enumerate(items, chunk.start)}
            ) from None
        return pack(pickler.file.getbuffer(), pickler.buffers, self._cache, _ITEMS)

    def _let_finish(self, listener: Listening, grace: float) -> None:
        """Interrupt the workers, and wait `grace` seconds for them to clean up."""
        self._board.end()
        self._next = len(self._items)
        begin, signum = time.monotonic(), signal.SIGINT
        for seconds in (*NUDGES, grace):
            for worker, has in enumerate(self._has):
                if has:
                    self._ranks.signal(worker, signum)
            signum = NUDGE
            while any(self._has) and time.monotonic() < begin + min(seconds, grace):
                listener.select(max(0.0, begin + min(seconds, grace) - time.monotonic()))
        self._relay.drain()

    # ---------------------------------------------------------------------------------------------- what workers say

    def _on_message(self, worker: int, message: protocol.FromRank, parcel: Parcel | None) -> None:
        if isinstance(message, protocol.Values):
            self._take(worker, message.seconds, parcel)
        elif isinstance(message, protocol.Error):
            error = rebuild(worker, self._ranks.pids[worker], message, parcel, self._call.originals)
            remote = error.__cause__
            if isinstance(remote, RemoteTraceback):
                remote.who, remote.where = f"worker {worker}", self._where(worker)
            if self._has[worker]:
                self._has[worker].popleft()
            self._error = self._error or error

    def _take(self, worker: int, seconds: float, parcel: Parcel | None) -> None:
        assert parcel is not None
        # A worker that was interrupted before it had the function says so, and then answers for each chunk, too.
        chunk = self._has[worker].popleft() if self._has[worker] else None
        if chunk is None or self._error is not None:
            parcel.close()
            return
        try:
            self._values[chunk.start : chunk.stop] = load(parcel, self._call.originals)
        except CaptureError as exc:
            self._error = exc
            return
        except Exception as exc:
            what = f"what the function returned for items {chunk.start} to {chunk.stop - 1} cannot be rebuilt here"
            self._error = CaptureError(f"{what} ({type(exc).__name__}: {text_of(exc)})")
            return
        each = seconds / (chunk.stop - chunk.start)
        self._seconds = max(each, 1e-7) if not self._seconds else (self._seconds + each) / 2
        self._advance(chunk.stop - chunk.start)
        self._give(worker)

    def _on_exit(self, exit: Exit) -> None:
        has, pid = self._has[exit.rank], self._ranks.pids[exit.rank]
        doing = self._where(exit.rank).lstrip(", ")
        self._relay.drain(exit.rank)
        output = self._relay.logs[exit.rank].tail()
        has.clear()
        died = WorkerDied(f"worker {exit.rank}", pid, exit.status, output, doing, exit.reason)
        self._error = self._error or died

    def _where(self, worker: int) -> str:
        """Return the item that a worker works on, as a part of a sentence."""
        number = self._board.item(worker)
        if number is not None:
            return f", at item {number} ({reprlib.repr(self._items[number])})"
        if not self._has[worker]:
            return ""
        first, stop = self._has[worker][0]  # on another machine there is no board
        return f", at item {first}" if stop - first == 1 else f", at one of items {first} to {stop - 1}"

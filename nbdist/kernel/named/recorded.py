"""Calls in the journal of a named session: their values and their output."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from ...errors import NbdistError, summary
from ...system.interrupts import interruptible
from ...wire.journal import Reader, Record, decode, numbers, path
from ...wire.parcel import Parcel
from ..calls import futures
from ..cell.cell import Cell
from .executor import NamedExecutor
from .replaying import Relays, Replayer, follow


def result(executor: NamedExecutor, call: int | None, timeout: float | None) -> Any:
    """Implement `Session.result`."""
    replayer = _recorded(executor, call)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with executor.connection.wakeup() as wakeup:
        follow(replayer, wakeup, deadline=deadline)
    if not replayer.over and time.monotonic() > deadline:
        raise TimeoutError(f"the call of {replayer.what} is not over after {timeout:g} s")
    executor.check_over(replayer)
    shown = executor.shown.get(replayer.head["token"])
    if shown is not None:  # another thread shows the call: the cell that has the value should have all of its output
        with interruptible():
            shown.wait(None if timeout is None else max(0.0, deadline - time.monotonic()))
    executor.take(replayer)
    return _outcome(executor, replayer)


def replay(executor: NamedExecutor, call: int | None, output: str | None, lines: int | None) -> None:
    """Implement `Session.replay`."""
    replayer = _recorded(executor, call, Cell(), output, lines)
    replayer.replay()
    replayer.finish()


def show_last(executor: NamedExecutor, lock: futures.FairLock) -> futures.CallFuture[Any] | None:
    """Show the last call from its beginning, and the rest in the background. Return None if the call is over.

    Calls that are made meanwhile wait for their turns in `lock`.
    """
    if _find(executor.folder.path, None) is None:
        return None
    cell = Cell(background=True)
    replayer = _recorded(executor, None, cell, relays=executor.relays)
    replayer.replay()
    if replayer.over or not executor.connection.alive:
        replayer.finish()
        executor.note_held(replayer)
        return None
    shown = executor.shown.setdefault(replayer.head["token"], threading.Event())
    carry_out = functools.partial(_follow, executor, replayer, cell)
    future = futures.in_background(carry_out, Parcel(b"", [], []), lock, replayer.what)
    future.add_done_callback(lambda _: shown.set())  # it may be canceled before its turn
    return future


def _follow(executor: NamedExecutor, replayer: Replayer, cell: Cell, stop: futures.Stop) -> Any:
    try:
        with executor.connection.wakeup() as wakeup:
            executor.follow(replayer, replayer.head["token"], stop, wakeup)
        return _outcome(executor, replayer)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        cell.notice(f"{replayer.what} failed: {summary(exc)}. result() raises it, with its traceback")
        raise


def _outcome(executor: NamedExecutor, replayer: Replayer) -> Any:
    values = executor.outcome(replayer)
    return values if replayer.head["everyone"] else values[0]


def _recorded(
    executor: NamedExecutor, call: int | None, cell: Cell | None = None, *how: Any, relays: Relays | None = None
) -> Replayer:
    with contextlib.suppress(NbdistError):  # the keeper has ended
        executor.connection.ask("flush")  # a value may be here before it is in the journal
    found = _find(executor.folder.path, call)
    if found is None:
        which = "call" if call is None else f"call number {call}"
        raise NbdistError(f"there is no {which} in the journal of the session {executor.folder.name!r}")
    start, head = found
    relays = relays or Relays(lambda *said: False, lambda: None)
    reader = Reader(executor.folder.path, start)
    return Replayer(relays, reader, cell, lambda one: one["call"] == head["call"], *how)


def _find(folder: str, call: int | None) -> tuple[int, Mapping[str, Any]] | None:
    """Return the file of the journal in which a call begins, and the head of its first record."""
    for number in reversed(numbers(folder)):
        heads = [
            record.head
            for record in _records(path(folder, number))
            if record.kind == "begin" and record.head["action"] == "call"
            if call in (None, record.head["number"])
        ]
        if heads:
            return number, heads[-1]
    return None


def _records(path: str) -> list[Record]:
    found, position, data = [], 0, b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        data = file.read()
    while (one := decode(data, position)) is not None:
        found.append(one[0])
        position = one[1]
    return found

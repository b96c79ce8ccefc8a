"""A worker of `parallel_map`: it keeps the function, and calls it with the items that arrive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ..capture.diagnosis import explain_unreadable
from ..capture.reading import Unreadable, read
from ..wire.board import Board
from ..wire.parcel import Parcel
from ..wire.protocol import Begin
from . import shell
from .call import Caller
from .world import enter_setting, seed_everything, take_share


class Mapper:
    """The function of a worker, and the results of its items."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._where = f"a worker (pid {os.getpid()})"
        self._fn: Callable[[Any], Any]
        self._board: Board
        self._worker = 0
        self._failed = False

    def begin(self, begin: Begin, parcel: Parcel, fds: list[int]) -> None:
        """Receive the function, and the descriptor of the board; on another machine there is no board."""
        self._worker, self._board = (begin.worker, Board.of(fds[0], begin.workers)) if fds else (0, Board.create(1))
        enter_setting(begin.setting)
        take_share(begin.threads)
        self._fn, _, _ = self._caller.take(begin.header, parcel, self._where)
        seed_everything(begin.seeds)

    def run(self, first: int, parcel: Parcel) -> tuple[float, list[Any]]:
        """Call the function with the items in the parcel, and return the time in seconds and the values. `first` is the
        number of the first item. If the call ends meanwhile, there are fewer values than items.
        """
        if self._failed:  # what the board says is to stay
            return 0.0, []
        try:
            return self._run(first, parcel)
        except BaseException:
            self._failed = True
            raise
        finally:
            shell.after_call()

    def _run(self, first: int, parcel: Parcel) -> tuple[float, list[Any]]:
        fn, board, mine = self._fn, self._board.cells, self._worker + 1
        board[mine] = first
        try:
            items = read(*parcel.open(), originals=self._caller.originals, keep=lambda key, namespace, name: True)
        except Unreadable as exc:
            raise explain_unreadable(exc, self._where) from exc.__cause__
        start, values = time.monotonic(), []
        with self._caller.python_functions:
            for number, item in enumerate(items, first):
                if board[0]:  # the call is over
                    break
                board[mine] = number
                values.append(fn(item))
        return time.monotonic() - start, values

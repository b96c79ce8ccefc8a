"""Requests of calls: arguments are checked, functions captured, seeds drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from ...capture.call import capture_call
from ...capture.foreign import name_of
from ...capture.imports import modules_named
from ...capture.per_rank import for_each_rank
from ...checks import check_choice, shown
from ...engines.contract import Engine
from ...wire.cache import SentCache
from ..options import SessionOptions
from .arguments import OUTPUTS, check_call, check_takes
from .executor import Executor, Request
from .futures import FairLock

#: Names of the options of a session, which people give to a function by mistake.
_OPTIONS = [field.name for field in fields(SessionOptions)]


class Requests:
    """The requests of one session.

    Args:
        engine: The engine, which imports the modules of a call before its ranks start.
        executor: The ranks that will run the requests.
        options: The options of the session.
    """

    def __init__(self, engine: Engine, executor: Executor, options: SessionOptions) -> None:
        self._engine, self._executor, self._options = engine, executor, options
        self.sent = SentCache()
        """The cache of buffers that were sent already."""
        self._capturing = FairLock()

    def make(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        imports: Any,
        need: Any,
        ranks: Any = None,
        everyone: bool = False,
        output: str | None = None,
        once: bool = False,
    ) -> Request:
        """Return the request of a call, with the arguments of `Session.call`. Raises the exceptions of
        `Session.run`."""
        self._executor.check_open()
        block, names = check_call(fn, imports, need)
        check_takes(fn, args, kwargs, _OPTIONS)
        own, nranks = self._options, len(self._executor.layout.devices)
        targets = None if ranks is None else chosen(ranks, nranks)
        output = own.output if output is None else check_choice(output, OUTPUTS, name="output")
        count, fixed = nranks if targets is None else len(targets), own.min_ranks is None or targets is not None
        args, kwargs = for_each_rank(args, kwargs, count, fixed=fixed)
        call = self._capturing.in_turn(lambda: capture_call(fn, args, kwargs, block, names, self.sent, own.settings))
        self._engine.warm([*modules_named(block), *sorted(call.modules)])
        seeds = draw_seeds() if own.seed is None else None
        return Request(call, seeds, targets, everyone, output, own.lines, name_of(fn), once)


def check_rank(rank: Any, nranks: int, of: str = "session") -> None:
    """Raise `TypeError` or `ValueError` unless `rank` is one of `nranks` ranks. `of` is their group in the error."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an integer, got {shown(rank)}")
    if not 0 <= rank < nranks:
        raise ValueError(
            f"rank must be 0 to {nranks - 1}, got {rank}: the {of} has {nranks} rank{'s' if nranks > 1 else ''}"
        )


def chosen(ranks: Any, nranks: int) -> list[int]:
    """Return the ranks that `ranks=` names, in order, in a session of `nranks`."""
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise TypeError(f"ranks must be a list of ranks, such as [0, 1], got {shown(ranks)}")
    named = list(ranks)
    for rank in named:
        check_rank(rank, nranks)
    if not named:
        raise ValueError("ranks must name at least one rank, got none")
    return sorted(set(named))


def draw_seeds() -> tuple[int, int, int]:
    """Draw seeds for `random`, NumPy and torch from the notebook's random states."""
    for_random = random.getrandbits(63)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    for_numpy = for_random if numpy is None else int(numpy.random.get_bit_generator().random_raw()) & (2**31 - 1)
    for_torch = for_random if torch is None else int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    return for_random, for_numpy, for_torch

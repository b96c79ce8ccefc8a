"""Callbacks: four methods of the user that `fit` calls during a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import ranks
from ..parallel.protocol import Parallel
from .history import History, Record


class Callback:
    """The base class of objects for `fit(callbacks=...)`, whose methods are called on every rank. Override any of the
    four methods.

    An exception in a method ends the training, like an exception in `predict`.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.sharding import replicate
        >>> from nbdist.recsys.training import Callback, fit
        >>> class Enough(Callback):
        ...     def on_record(self, record):
        ...         return record.loss < 0.6
        >>> def predict(model, batch):
        ...     return model(batch["x"]).squeeze(1), batch["liked"]
        >>> def train():
        ...     x = torch.linspace(-1, 1, 100)[:, None]
        ...     rows = MemoryLoader({"x": x, "liked": x[:, 0] > 0}, 10)
        ...     model = replicate(torch.nn.Linear(1, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        ...     return fit(model, predict, rows, epochs=50, callbacks=[Enough()], progress=False)
        >>> len(in_ddp(2, train)) < 50
        True
    """

    def on_start(self, model: Parallel, history: History) -> None:
        """Run before the first step, after a snapshot was loaded.

        Args:
            model: The model that is trained.
            history: The records of the run; not empty if the run is resumed.
        """

    def on_step(self, step: int) -> None:
        """Run after each step; `step` is its number in the run.

        If a class defines this method, steps cannot be captured (`fit(captured=...)`).
        """

    def on_record(self, record: Record) -> bool | None:
        """Run after each new record of the history. If the method returns True on rank 0, the training stops."""
        return None

    def on_end(self, history: History) -> None:
        """Run after the last step, but not after an exception."""


class Hooks:
    """The callbacks of a run.

    Args:
        callbacks: The callbacks of this rank, in the order in which they are called. All ranks must have the same
            number.
        last: The callback that is called after them.

    Raises:
        TypeError: The callbacks are no list, or an object is not a callback.
    """

    def __init__(self, callbacks: Sequence[Any], last: Callback) -> None:
        if not isinstance(callbacks, Sequence):
            raise TypeError(f"`callbacks` must be a list of callbacks, got {callbacks!r}: give [{callbacks!r}]")
        for one in callbacks:
            if not isinstance(one, Callback):
                hint = ": make one, with ()" if isinstance(one, type) else ""
                raise TypeError(f"`callbacks` must have instances of Callback, got {one!r}{hint}")
        self._callbacks: list[Callback] = [*callbacks, last]

    @property
    def each_step(self) -> bool:
        """True if a callback has `on_step`."""
        return any(type(one).on_step is not Callback.on_step for one in self._callbacks)

    def start(self, model: Parallel, history: History) -> None:
        """Call `on_start`."""
        for one in self._callbacks:
            one.on_start(model, history)

    def step(self, step: int) -> None:
        """Call `on_step`."""
        for one in self._callbacks:
            one.on_step(step)

    def record(self, record: Record) -> bool:
        """Call `on_record`; return whether a callback stops the training. All ranks must call it."""
        answers = [bool(one.on_record(record)) for one in self._callbacks]
        return ranks.on_rank_0(lambda: any(answers))

    def end(self, history: History) -> None:
        """Call `on_end`."""
        for one in self._callbacks:
            one.on_end(history)

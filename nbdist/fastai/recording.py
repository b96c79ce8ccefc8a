"""`RecordSteps`, a callback by which a learner records its training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from fastai.basics import CancelEpochException, CancelFitException, noop
from fastai.callback.core import Callback

from ..recsys.loader.base import Loader
from ..replay.log import StepLog
from ..replay.random_states import random_state, set_random_state
from .callback_states import restore, states

__all__ = ["RecordSteps"]


class RecordSteps(Callback):
    """A callback that records a training on CPU ranks, so that `nbdist.replay_step` can run any of its steps again.

    A step is a batch of training, counted over all trainings of the learner. A snapshot holds the states of model,
    optimizer and loader, the gradients, the values that other callbacks have collected (numbers, strings, tensors,
    lists and dicts of these, and objects with a `state_dict`), and the states of the random generators. The first
    snapshots are 25 steps apart; in a longer training, the distance grows, so that each rank has at most 20. Each step
    also costs some microseconds and four bytes, for a mark of its result.

    Args:
        folder: A folder that all ranks can reach, and that holds no recording. It is made if it does not exist.

    Raises:
        ValueError: At the beginning of the training, if the folder already holds a recording, or the rank has a GPU.
        RuntimeError: At the beginning of the training, if the process is in no process group.

    Examples:
        >>> from fastai.collab import CollabDataLoaders, collab_learner
        >>> from nbdist import in_ddp, replay_step
        >>> from nbdist.fastai import RecordSteps
        >>> from nbdist.recsys.datasets import synthetic_ratings
        >>> ratings = synthetic_ratings(n_users=50, n_items=20, n_ratings=640).frame.to_pandas()
        >>> def train():
        ...     dls = CollabDataLoaders.from_df(ratings, bs=32)
        ...     learn = collab_learner(dls, n_factors=5, y_range=(0, 5.5), cbs=RecordSteps("learned"))
        ...     with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        ...         learn.fit_one_cycle(3, 5e-3)
        >>> in_ddp.options(devices="cpu", imports="from fastai.distributed import *")(2, train)
        >>> replay_step("learned", train, step=11, rank=1, imports="from fastai.distributed import *")
        step 11 of rank 1: the result is the recorded one, bit for bit
    """

    order = 100  # after all that changes the model, the loader or the schedule

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder
        self._log: StepLog | None = None
        self._steps = self._fits = self._skipped = self._number = 0
        self._start: Any = None
        self._begun: dict[str, Any] = {}
        self._paused: list[Callback] = []

    def before_fit(self) -> None:
        """Begin to record. While a step is run again, skip a training that ended before this step."""
        if self._log is None:
            self._log = StepLog(self._folder)
            if self._log.target is not None:
                self._start = self._log.read()
        self._fits += 1
        if self._start is not None:
            self.learn.logger = noop
            if self._fits < self._start["fit"]:
                raise CancelFitException

    def before_epoch(self) -> None:
        """While a step is run again, skip an epoch that ended before this step, without the other callbacks."""
        if self._start is not None and self.epoch < self._start["epoch"]:
            self._paused = self._paused or [one for one in self._others() if one.run]
            for one in self._paused:
                one.run = False
            raise CancelEpochException
        paused, self._paused = self._paused, []
        for one in paused:
            one.run = True
            if one.order <= self.order:
                one("before_epoch")

    def before_train(self) -> None:
        """Record the state on which the order of the batches depends, and write the first snapshot; or continue from a
        snapshot."""
        assert self._log is not None
        if self._start is None:
            self._begun, self._skipped, self._number = {"order": _order(self.dl), "random": random_state()}, 0, 0
            self._log.write(self._steps, self._state)
        else:
            self._begun, self._skipped = self._start["begun"], self._start["number"]
            self._number = self._skipped
            _set_order(self.dl, self._begun["order"])
            set_random_state(self._begun["random"])
            self.learn.dl = _Rest(self.dl, self._skipped, self._load)

    def after_batch(self) -> None:
        """Count a step, and write a snapshot if one is due."""
        if not self.training:
            return
        assert self._log is not None
        self._steps += 1
        self._number += 1
        self._log.done(self._steps, [self.model], float(self.loss))
        self._log.write(self._steps, self._state)

    def _others(self) -> list[Callback]:
        return [one for one in self.learn.cbs.sorted("order") if one is not self]

    def _state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            **{"step": self._steps, "fit": self._fits, "epoch": self.epoch, "number": self._number},
            **{"begun": self._begun, "random": random_state(), "model": self.model.state_dict()},
            **{"optimizer": self.opt.state_dict(), "gradients": [one.grad for one in self.model.parameters()]},
            **{"pct_train": self.learn.pct_train, "train_iter": self.learn.train_iter},
            "callbacks": states(self._others()),
        }

    def _load(self) -> None:
        state, self._start = self._start, None
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["optimizer"])
        for one, gradient in zip(self.model.parameters(), state["gradients"], strict=True):
            one.grad = gradient
        self.learn.pct_train, self.learn.train_iter = state["pct_train"], state["train_iter"]
        restore(self._others(), state["callbacks"])
        self._steps = state["step"]
        set_random_state(state["random"])


class _Rest:
    """The batches of a loader after the first ones.

    Args:
        loader: The loader; all other attributes come from it.
        skipped: The number of batches to leave out.
        then: A function that is called after these batches.
    """

    def __init__(self, loader: Any, skipped: int, then: Any) -> None:
        self._loader, self._skipped, self._then = loader, skipped, then

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for _ in range(self._skipped):
            next(batches)
        self._then()
        yield from batches


def _order(loader: Any) -> Any:
    """Return the state on which the order of the next epoch depends."""
    if isinstance(loader, Loader):
        return loader.state_dict()
    return _innermost(loader).rng.getstate()


def _set_order(loader: Any, order: Any) -> None:
    if isinstance(loader, Loader):
        loader.load_state_dict(order)
    else:
        _innermost(loader).rng.setstate(order)


def _innermost(loader: Any) -> Any:
    """Return the loader of fastai that draws the order of an epoch. It is inside the loader that divides the order
    among ranks."""
    while not hasattr(loader, "rng"):
        loader = loader.dl
    return loader

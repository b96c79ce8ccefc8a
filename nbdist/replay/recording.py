"""`Recording`, which records a training loop that is written by hand."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from ..checks import check_path, shown
from ..errors import entry_class
from .loader_state import loader_state, set_loader_state
from .log import StepLog
from .random_states import random_state, set_random_state

T = TypeVar("T")


@entry_class("Recording")
class Recording:
    """The recording of a training loop on CPU ranks, so that `replay_step` can run any of its steps again.

    A step is one pass through the body of the loop over `steps(loader)`. A snapshot holds the states of `objects`, the
    gradients, the states of the random generators, and the generators and counters of the loader. The first snapshots
    are 25 steps apart; in a longer training, the distance grows, so that there are at most 20. On each rank, a snapshot
    takes as many bytes as the model and the optimizer. Each step also costs some microseconds and four bytes, for a
    mark of its result.

    Args:
        folder: A folder that all ranks can reach, and that holds no recording. It is made if it does not exist.
        *objects: All objects that a step reads and changes: the model, the optimizer, a scheduler, a scaler. Each has
            `state_dict()` and `load_state_dict(...)`.

    Raises:
        TypeError: One of the objects lacks these methods, none is a model, or a model has a table of raw ids.
        ValueError: The folder already holds a recording, or the rank has a GPU.
        RuntimeError: The process is in no process group.

    Examples:
        >>> import torch
        >>> from nbdist import Recording, in_ddp, replay_step
        >>> def train():
        ...     model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        ...     optimizer = torch.optim.Adam(model.parameters())
        ...     rows = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=8, shuffle=True)
        ...     recording = Recording("recorded", model, optimizer)
        ...     for epoch in range(5):
        ...         for batch in recording.steps(rows):
        ...             optimizer.zero_grad()
        ...             loss = model(batch).square().mean()
        ...             loss.backward()
        ...             optimizer.step()
        >>> in_ddp.options(devices="cpu")(2, train)
        >>> replay_step("recorded", train, step=33, rank=1)
        step 33 of rank 1: the result is the recorded one, bit for bit
    """

    def __init__(self, folder: str | os.PathLike[str], *objects: Any) -> None:
        check_path(folder, name="folder", usage="Recording(folder, model, optimizer)")
        for one in objects:
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise TypeError(
                    f"Recording takes a folder and objects with state_dict() and load_state_dict(), got {shown(one)}"
                )
        if not any(isinstance(one, nn.Module) for one in objects):
            raise TypeError("Recording needs the model among its objects: Recording(folder, model, optimizer)")
        self._objects = objects
        self._modules = [one for one in objects if isinstance(one, nn.Module)]
        for part in (part for module in self._modules for part in module.modules()):
            if hasattr(part, "recorded_by"):
                raise TypeError(
                    f"Recording cannot restore a {type(part).__name__} together with its optimizer: train it with "
                    f"{part.recorded_by}"
                )
        self._log = StepLog(folder)
        self._step = self._pass = self._number = 0
        self._in_step = False
        self._start = None if self._log.target is None else self._log.read()

    @property
    def number(self) -> int:
        """The number of the current batch in its epoch, from 0, also while a step is run again.

        Use it in place of `enumerate(recording.steps(loader))`, which would count from the snapshot there: to update
        the parameters after every fourth batch, for example.

        Examples:
            >>> import torch
            >>> from nbdist import Recording, in_ddp
            >>> def train():
            ...     model = torch.nn.Linear(2, 1)
            ...     recording = Recording("numbered", model)
            ...     rows = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)
            ...     return [recording.number for batch in recording.steps(rows)]
            >>> in_ddp.options(devices="cpu")(2, train)
            [0, 1, 2]
        """
        return self._number

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, and record a step for each.

        Call it once in each epoch. While a step is run again, it yields nothing for the epochs before that step.

        Args:
            loader: The batches of an epoch, such as a `DataLoader`.
        """
        log, start, self._number = self._log, self._start, 0
        self._end_step()  # of a loop that ended in `break`
        self._pass += 1
        begun = random_state(), loader_state(loader)
        if start is not None:
            if self._pass < start["pass"]:
                return
            begun = start["begun"]
            set_random_state(begun[0])
            set_loader_state(loader, begun[1])
        batches = iter(loader)
        if start is not None:
            for _ in range(start["number"]):
                next(batches)
            self._load(start)
            self._start, self._number = None, start["number"]
        while True:
            log.write(self._step, functools.partial(self._state, begun))
            try:
                batch = next(batches)
            except StopIteration:
                return
            log.begin(self._step + 1)
            self._in_step = True
            yield batch
            self._number += 1
            self._end_step()

    def _end_step(self) -> None:
        """Record the result of the step that was begun last, if that is not done yet."""
        if self._in_step:
            self._in_step = False
            self._step += 1
            self._log.done(self._step, self._modules)

    def _state(self, begun: Any) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            **{"step": self._step, "pass": self._pass, "number": self._number, "begun": begun},
            "random": random_state(),
            "objects": [one.state_dict() for one in self._objects],
            "gradients": [[one.grad for one in module.parameters()] for module in self._modules],
        }

    def _load(self, state: dict[str, Any]) -> None:
        for one, own in zip(self._objects, state["objects"], strict=True):
            one.load_state_dict(own)
        for module, gradients in zip(self._modules, state["gradients"], strict=True):
            for one, gradient in zip(module.parameters(), gradients, strict=True):
                one.grad = gradient
        self._step = state["step"]
        set_random_state(state["random"])

"""Learning rates over the steps of a run: functions from a step to a factor of the learning rates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LambdaLR

Schedule: TypeAlias = Callable[[int], float]
"""A function from a step, from 0, to a factor. Any function can be used, as for `torch.optim.lr_scheduler.LambdaLR`,
which applies it. It is only called for the steps of the run."""


def warmup_decay(
    steps: int, *, warmup: int = 0, decay_start: int | None = None, final: float = 0.0, shape: str | float = "cosine"
) -> Schedule:
    """Return a schedule that rises linearly to the full learning rate, and then falls to a part of it.

    Args:
        steps: The number of steps of the run. The decay ends with the last one.
        warmup: The number of steps until the full learning rate. The first of them has `1 / warmup` of it.
        decay_start: The step at which the decay begins. None: after the warm-up.
        final: The learning rate at the end, as a part of the full learning rate.
        shape: The shape of the decay: "cosine", "linear", or a power, such as 2 for a falling parabola.

    Raises:
        ValueError: Warm-up and decay do not follow one another within `steps`, or the shape is unknown.

    Examples:
        >>> from nbdist.recsys.training import warmup_decay
        >>> factor = warmup_decay(8, warmup=4, shape="linear")  # for fit(..., schedule=factor)
        >>> [factor(step) for step in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    start = warmup if decay_start is None else decay_start
    if not 0 <= warmup <= start < steps:
        raise ValueError(
            f"`warmup`, `decay_start` and `steps` must be 0 <= warmup <= decay_start < steps, got {warmup}, {start} "
            f"and {steps}"
        )
    if shape not in ("cosine", "linear") and not (isinstance(shape, (int, float)) and shape > 0):
        raise ValueError(f'`shape` must be "cosine", "linear" or a power above 0, got {shape!r}')

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        left = 1 - min(max(step - start, 0) / (steps - start), 1.0)
        if shape == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        elif shape != "linear":
            left = left ** float(shape)
        return final + (1 - final) * left

    return factor


def factor_of(schedule: Schedule, step: int) -> float:
    """Return a schedule's factor for a step; raise `ValueError` unless it is finite and at least 0."""
    found: Any = schedule(step)
    try:
        factor = float(found)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ValueError(f"`schedule` must return finite numbers, at least 0, got {found!r} for step {step}")
    return factor


@contextlib.contextmanager
def scheduled(optimizer: torch.optim.Optimizer, factor: Schedule, first: int) -> Iterator[LambdaLR]:
    """Multiply the learning rates by factors during a run that begins at step `first`.

    Before and after the run, the optimizer has its full learning rates, so that rates that are set between two runs
    take effect.
    """
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)  # of another scheduler: LambdaLR would go on from it
    rates = LambdaLR(optimizer, lambda further: factor(first + further))
    try:
        yield rates
    finally:
        for group in optimizer.param_groups:
            full = group.pop("initial_lr")
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(full)
            else:
                group["lr"] = full

"""Optimizers of sharded tables: those that FBGEMM fuses into the backward pass, and those that are deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..parallel.optimizer_choice import BY_NAME

#: Name → what FBGEMM calls it, in its `EmbOptimType`.
OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
    "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM",
    "lamb": "LAMB",
    "partial_rowwise_lamb": "PARTIAL_ROWWISE_LAMB",
}


def _rowwise_adagrad(params: Any, lr: float, eps: float) -> torch.optim.Optimizer:
    from torchrec.optim import RowWiseAdagrad

    return RowWiseAdagrad(params, lr=lr, eps=eps)  # type: ignore[no-any-return]


# The fused ones that FBGEMM has for CPUs. They leave alone the rows that a batch does not touch, and so do their dense
# counterparts, given to the tables that every rank has a copy of; Adam and the others would move those rows.
EVERYWHERE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": BY_NAME["sgd"],
    "adagrad": BY_NAME["adagrad"],
    "rowwise_adagrad": _rowwise_adagrad,
}
DEFERRED = (*EVERYWHERE, "adam")
"""The optimizers that can be deferred to the optimizer's step."""


MOMENTUM = "sgd with momentum"
"""The name of the optimizer of all tables that a callable with momentum makes. FBGEMM does not have it."""
TYPES = {**OPTIMIZERS, MOMENTUM: OPTIMIZERS["adagrad"]}
"""The names of all optimizers, and FBGEMM's type whose state has the same shape."""


def check_optimizer(optimizer: str, device: torch.device, fused: bool | None) -> None:
    """Raise `ValueError` for an unknown optimizer, or one that is not possible with the device or `fused`."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"`optimizer` must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if device.type == "cpu" and optimizer not in EVERYWHERE and (fused or optimizer not in DEFERRED):
        others = ", ".join(EVERYWHERE) if fused else ", ".join(DEFERRED)
        raise ValueError(
            f"`optimizer` must be one of {others} on CPU ranks, got {optimizer!r}, which FBGEMM has not fused there"
        )
    if fused is False and optimizer not in DEFERRED:
        raise ValueError(f"`optimizer` must be one of {', '.join(DEFERRED)} with fused=False, got {optimizer!r}")


def fused_types(device: torch.device, fused: bool | None) -> set[str]:
    """Return the names among `OPTIMIZERS` that are used fused."""
    return set() if fused is False else set(EVERYWHERE if device.type == "cpu" else OPTIMIZERS)


def check_momentum(fused: bool | None) -> None:
    """Raise `ValueError` if tables with momentum are to be updated in the backward pass."""
    if fused:
        raise ValueError("`fused` must be None or False where SGD has momentum, got True: FBGEMM has no such optimizer")

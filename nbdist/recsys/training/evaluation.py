"""A model's predictions for batches, and what metrics say of them over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from ...devices import collective_device
from ..loader.base import Loader

Predict: TypeAlias = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Model and batch → predictions, such as logits of shape (rows,), and targets."""


@torch.no_grad()
def evaluate(
    model: nn.Module, predict: Predict, loader: Loader, metrics: Mapping[str, Metric], *, bf16: bool = False
) -> dict[str, float]:
    """The metrics of a model over all rows of a loader, on all ranks; the model is in evaluation mode meanwhile.

    All ranks have to call it, and get the same numbers.
    """
    was_training = model.training
    model.eval()
    for metric in metrics.values():
        metric.to(collective_device()).reset()
    try:
        for batch in loader:
            predictions, targets = forward(model, predict, batch, bf16)
            for metric in metrics.values():
                metric.update(predictions, targets)
    finally:
        model.train(was_training)
    values = torch.tensor([float(metric.compute()) for metric in metrics.values()], dtype=torch.float64)
    values = values.to(collective_device())
    dist.broadcast(values, src=0)  # ranks that stop by them must not differ in the last bit, as sums on a GPU may
    return dict(zip(metrics, values.tolist(), strict=True))


def forward(model: nn.Module, predict: Predict, batch: Any, bf16: bool) -> tuple[Tensor, Tensor]:
    """Predictions, in single precision, and targets of a batch."""
    with torch.autocast(collective_device().type, torch.bfloat16) if bf16 else contextlib.nullcontext():
        predictions, targets = predict(model, batch)
    return predictions.float(), targets

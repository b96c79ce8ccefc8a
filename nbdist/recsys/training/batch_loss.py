"""The loss of a batch, with errors for shapes that would be broadcast and for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def batch_loss(
    loss: Callable[..., Tensor], predictions: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the loss of a batch. It is 0 without predictions, for example of SASRec for histories of one item.

    Raises:
        ValueError: Predictions and targets have the same number of elements but different shapes, or the loss is not
            one number.
    """
    if not predictions.numel():
        return predictions.sum()
    if 1 < predictions.numel() == targets.numel() and predictions.shape != targets.shape:
        # Unless targets are numbers of classes, and there is one class.
        classes = not targets.is_floating_point() and predictions.ndim == 2 and targets.ndim == 1
        if not classes or (targets.device.type == "cpu" and targets.any()):
            raise ValueError(
                f"predictions and targets must have one shape, got {tuple(predictions.shape)} and "
                f"{tuple(targets.shape)}: most losses would pair each prediction with each target. Return "
                "predictions.squeeze(1), or targets.unsqueeze(1)"
            )
    found = loss(predictions, targets) if weights is None else loss(predictions, targets, weights)
    if not isinstance(found, Tensor) or found.numel() != 1:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"`loss` must return one number, the mean over the rows, got {got}")
    return found


def not_finite(step: int, rank: int, predictions: Tensor, targets: Tensor, task: str = "") -> ValueError:
    """Return the error for a loss that is not finite, with the first row that explains it."""
    of = f" of task {task!r}" if task else ""
    for what, values in (("target", targets), ("prediction", predictions)):
        wrong = values.isnan() | (values == torch.inf)  # a logit of -inf is one that is left out
        if values.ndim and wrong.any():
            row = int(wrong.nonzero()[0, 0])
            return ValueError(
                f"the loss of step {step}{of} is not finite: row {row} of the batch of rank {rank} has a {what} that "
                f"is {values[row].tolist()}. No step is taken with it; correct or remove such rows"
            )
    return ValueError(
        f"the loss of step {step}{of} is not finite on rank {rank}, though its predictions and targets are: look at "
        "`loss`"
    )


def not_finite_since(step: int) -> ValueError:
    """Return the error for a sum of losses, over some steps up to the given one, that is not finite."""
    return ValueError(
        f"the loss of a step up to step {step} is not finite: a feature, a target or a weight is NaN or infinite, and "
        "so may the weights be by now. On CPUs, fit() stops before that step and names the row"
    )

"""Checks for all metrics: one column, equal numbers of rows, and finite numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


def checked_rows(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors flat and without gradients.

    Raises:
        ValueError: An argument has several columns, the numbers of rows differ, or a number is not finite.
    """
    predictions, targets = _flat("predictions", predictions), _flat("targets", targets)
    if len(predictions) != len(targets):
        raise ValueError(f"{len(predictions)} predictions for {len(targets)} targets")
    check_finite("predictions", predictions)
    check_finite("targets", targets)
    return predictions, targets


def checked_weights(weights: Tensor | None, rows: Tensor) -> Tensor:
    """Return the weights of some rows, flat, float64; without weights, 1 for each.

    Raises:
        ValueError: The number of weights is not the number of rows, or a weight is below 0 or not finite.
    """
    if weights is None:
        return torch.ones((), dtype=torch.float64, device=rows.device).expand(len(rows))
    weights = _flat("weights", weights).double()
    if len(weights) != len(rows):
        raise ValueError(f"{len(weights)} weights for {len(rows)} rows")
    check_finite("weights", weights)
    if (weights < 0).any():
        row = int((weights < 0).nonzero()[0])
        raise ValueError(f"weights must be at least 0, got {weights[row].item()} in row {row}")
    return weights


def checked_labels(targets: Tensor) -> Tensor:
    """Return labels as integers. Raises `ValueError` for labels other than 0 and 1."""
    wrong = (targets != 0) & (targets != 1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"targets must be labels, 0 or 1, or booleans, got {targets[row].item()} in row {row}")
    return targets.long()


def check_finite(what: str, values: Tensor, owners: Tensor | None = None) -> None:
    """Raise `ValueError` for numbers that are not finite.

    Args:
        what: The name of the values, in the plural.
        values: Shape (rows,).
        owners: The user of each row, for the error; shape (rows,).
    """
    wrong = ~values.isfinite()
    if wrong.any():
        row = int(wrong.nonzero()[0])
        user = "" if owners is None else f" (user {owners[row].item()})"
        raise ValueError(
            f"{int(wrong.sum())} of {len(values)} {what} are not finite, the first is {values[row].item()} in row "
            f"{row}{user} of this rank's batch"
        )


def check_some_rows(metric: Metric, rows: Tensor | int) -> None:
    """Raise `ValueError` if the number of rows, or the sum of their weights, is 0."""
    if not rows:
        raise ValueError(
            f"{type(metric).__name__}: no rows on any rank since the start, or since reset(), or only rows of weight 0"
        )


def _flat(what: str, values: Tensor) -> Tensor:
    if values.ndim > 1 and values.numel() != len(values):
        raise ValueError(
            f"{what} must have one column, got the shape {tuple(values.shape)}: measure each task with a metric of its "
            "own, by one predict for each"
        )
    return values.detach().flatten()

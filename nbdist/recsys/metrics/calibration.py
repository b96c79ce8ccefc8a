"""Metrics that compare predicted probabilities with the share of rows with label 1."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_some_rows
from .rows import LogLoss


class _OfProbabilities(LogLoss):
    """Sums over rows, with weights, of the loss, the predictions and the labels."""

    def __init__(self, logits: bool = False) -> None:
        super().__init__(logits)
        self.predicted: Tensor
        self.positive: Tensor
        for name in ("predicted", "positive"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add rows.

        Args:
            preds: Probabilities or, with `logits`, logits, one per row.
            target: Labels, one per row: 0 or 1, or booleans.
            weights: Weights of the rows, at least 0. None: 1 for each.

        Raises:
            ValueError: The errors of `LogLoss.update`.
        """
        super().update(preds, target, weights)
        preds, target = preds.detach().flatten().double(), target.detach().flatten().double()
        some = torch.ones_like(preds) if weights is None else weights.detach().flatten().double()
        self.predicted += (preds.sigmoid() if self.logits else preds) @ some
        self.positive += target @ some


class NormalizedEntropy(_OfProbabilities):
    """The log loss, divided by the log loss of a model that always predicts the share of labels of 1 (He et al., 2014).

    Below 1, the model predicts better than this share; 0 is perfect. Unlike the log loss, it can be compared between
    data with different shares.

    Args:
        logits: Whether predictions are logits; otherwise they are probabilities.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import NormalizedEntropy
        >>> entropy = NormalizedEntropy()
        >>> entropy.update(torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([1, 0, 1, 0]))
        >>> float(entropy.compute())
        1.0
    """

    def compute(self) -> Tensor:
        """Return the normalized entropy of all rows of all ranks. Raises `ValueError` without rows, or with one label
        only."""
        loss, share = super().compute(), self.positive / self.weight
        if not 0 < share < 1:
            raise ValueError(
                f"NormalizedEntropy: there must be labels of 0 and of 1, got only labels of {int(share > 0)}"
            )
        entropy: Tensor = -(share * share.log() + (1 - share) * (1 - share).log())
        return loss / entropy


class Calibration(_OfProbabilities):
    """The mean prediction divided by the share of labels of 1. Above 1, the predictions are too high.

    Args:
        logits: Whether predictions are logits; otherwise they are probabilities.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import Calibration
        >>> calibration = Calibration()
        >>> calibration.update(torch.tensor([0.5, 0.75, 0.25, 0.5]), torch.tensor([1, 0, 0, 0]))
        >>> float(calibration.compute())
        2.0
    """

    higher_is_better = None  # type: ignore[assignment]  # the best is 1

    def compute(self) -> Tensor:
        """Return the ratio over all rows of all ranks. Raises `ValueError` without rows, or without a label of 1."""
        check_some_rows(self, self.weight)
        if not self.positive:
            raise ValueError("Calibration: at least one row must have the label 1, got none")
        return self.predicted / self.positive

"""Metrics of single rows, over all ranks: AUC, log loss, RMSE; and the number of rows per second.

All are torchmetrics metrics: call `update` with each batch on each rank, and `compute` on all ranks. `compute` returns
the same number on every rank, over all rows. Without a process group, the metrics cover the rows of this process. Make
them on the device of the predictions: ``AUC().to(device)``. ::

    auc, speed = AUC(), Throughput()
    for batch in loader:
        auc.update(model(batch), batch["liked"])
        speed.update(len(batch["liked"]))
    print(auc.compute(), speed.compute())

A row with the weight w counts like w rows; without weights each row counts once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from .checks import check_some_rows, checked_labels, checked_rows, checked_weights


class OfKeptRows(Metric):
    """A metric that keeps the rows of all updates, in a list for each of the states `kept`, which have these types."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    kept: ClassVar[Mapping[str, torch.dtype]]

    def __init__(self) -> None:
        super().__init__()
        for name in self.kept:
            self.add_state(name, [], dist_reduce_fx="cat")

    def _keep(self, *columns: Tensor) -> None:
        """Add rows: a tensor for each state, in the order of `kept`."""
        for (name, dtype), values in zip(self.kept.items(), columns, strict=True):
            getattr(self, name).append(values.to(dtype))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the rows of all ranks. A rank without rows gives an empty tensor of the same dtype, because gloo
        aborts otherwise."""
        for name, dtype in self.kept.items():
            parts = getattr(self, name)
            empty = torch.empty(0, dtype=dtype, device=self.device)
            setattr(self, name, [dim_zero_cat(parts) if len(parts) else empty])
        super().sync(*args, **kwargs)

    def _columns(self) -> list[Tensor]:
        """Return the rows of all updates, a tensor for each state. Raises `ValueError` without rows."""
        columns = [getattr(self, name) for name in self.kept]
        check_some_rows(self, len(columns[0]))
        columns = [dim_zero_cat(one) for one in columns]
        check_some_rows(self, len(columns[0]))
        return columns


class AUC(OfKeptRows):
    """The area under the ROC curve: the probability that a positive row is ranked above a negative row; ties count
    half.

    It is exact, in double precision: it keeps the predictions of all rows, and `compute` gathers the predictions of all
    ranks on each rank. (torchmetrics' own `BinaryAUROC` sums in single precision, and applies a sigmoid to batches
    whose values look like logits.)

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import AUC
        >>> auc = AUC()
        >>> auc.update(torch.tensor([0.9, 0.6]), torch.tensor([1, 0]))  # a batch
        >>> auc.update(torch.tensor([0.4, 0.2]), torch.tensor([1, 0]))
        >>> float(auc.compute())
        0.75
    """

    kept: ClassVar = {"scores": torch.float64, "labels": torch.uint8, "weights": torch.float64}

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add rows.

        Args:
            preds: Scores, one per row; a higher score means more liked.
            target: Labels, one per row: 0 or 1, or booleans.
            weights: Weights of the rows, at least 0. None: 1 for each.

        Raises:
            ValueError: The tensors differ in their numbers of rows or have several columns, a score or a weight is not
                finite, a weight is below 0, or a label is not 0 or 1.
        """
        preds, target = checked_rows(preds, target)
        labels, weights = checked_labels(target), checked_weights(weights, preds)
        self._keep(preds, labels, weights)

    def compute(self) -> Tensor:
        """Return the AUC of all rows of all ranks, 0 to 1. Raises `ValueError` without rows, or with one label only."""
        scores, labels, weights = self._columns()
        # By score, in rising order, the weights of rows with the label 1, and of the others.
        _, group = scores.unique(return_inverse=True)
        liked = group.bincount(weights=weights * labels)
        others = group.bincount(weights=weights * (1 - labels))
        if not liked.any() or not others.any():
            count = int(labels.sum(dtype=torch.int64))
            weighted = ", with weights above 0" if 0 < count < len(labels) else ""
            raise ValueError(f"AUC of {len(labels)} rows with {count} labels of 1: it needs both labels{weighted}")
        wins: Tensor = (liked * (others.cumsum(0) - others / 2)).sum()  # equal scores count half
        pairs: Tensor = liked.sum() * others.sum()
        return wins / pairs


class _Mean(Metric):
    """A mean over rows, by their weights."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.weight: Tensor
        for name in ("total", "weight"):  # float32 sums stop growing at some ten million rows
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, values: Tensor, weights: Tensor) -> None:
        self.total += values @ weights
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean over all rows of all ranks. Raises `ValueError` without rows, or if all weights are 0."""
        check_some_rows(self, self.weight)
        return self.total / self.weight


class LogLoss(_Mean):
    """The mean negative log likelihood of the labels, in nats.

    Args:
        logits: Whether predictions are logits; otherwise they are probabilities.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import LogLoss
        >>> loss = LogLoss(logits=True)
        >>> loss.update(torch.tensor([0.0, 2.0]), torch.tensor([1, 1]))
        >>> round(float(loss.compute()), 4)
        0.41
    """

    def __init__(self, logits: bool = False) -> None:
        super().__init__()
        self.logits = logits

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add rows. A wrong prediction with probability 0 or 1 counts as a loss of 100.

        Args:
            preds: Probabilities or, with `logits`, logits, one per row.
            target: Labels, one per row: 0 or 1, or booleans.
            weights: Weights of the rows, at least 0. None: 1 for each.

        Raises:
            ValueError: The errors of `AUC.update`; also probabilities outside 0 to 1.
        """
        preds, target = checked_rows(preds, target)
        labels, weights = checked_labels(target).double(), checked_weights(weights, preds)
        if self.logits:
            losses = nn.functional.binary_cross_entropy_with_logits(preds.double(), labels, reduction="none")
        else:
            if len(preds) and not 0 <= float(preds.min()) <= float(preds.max()) <= 1:
                raise ValueError("predictions are not probabilities: give sigmoid(predictions), or logits=True")
            losses = nn.functional.binary_cross_entropy(preds.double(), labels, reduction="none")
        self._add(losses, weights)


class RMSE(_Mean):
    """The root mean squared error, in the unit of the targets.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import RMSE
        >>> rmse = RMSE()
        >>> rmse.update(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 5.0]))
        >>> float(rmse.compute())
        1.0
    """

    def update(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add rows.

        Args:
            preds: Predictions, one per row.
            target: The true values.
            weights: Weights of the rows, at least 0. None: 1 for each.

        Raises:
            ValueError: The tensors differ in their numbers of rows or have several columns, a number is not finite, or
                a weight is below 0.
        """
        preds, target = checked_rows(preds, target)
        self._add((preds.double() - target.double()).square(), checked_weights(weights, preds))

    def compute(self) -> Tensor:
        """Return the error over all rows of all ranks. Raises `ValueError` without rows, or if all weights are 0."""
        found: Tensor = super().compute().sqrt()
        return found


class Throughput(Metric):
    """The rows per second of all ranks together: all their rows, divided by the time of the slowest rank.

    The time starts at the creation of the metric, or at `reset`, and ends at the last `update`. Work on a GPU may not
    be finished then: call `torch.cuda.synchronize()` before the last update.

    Examples:
        >>> from nbdist.recsys.metrics import Throughput
        >>> speed = Throughput()
        >>> for rows in (2048, 2048):  # of each batch
        ...     speed.update(rows)
        >>> speed.compute()
        tensor(..., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor
        self.seconds: Tensor
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("seconds", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="max")
        self._began = time.perf_counter()

    def reset(self) -> None:
        """Start again, with the time and the rows at 0."""
        super().reset()
        self._began = time.perf_counter()

    def update(self, rows: int) -> None:
        """Add `rows` to the number of rows, and set the seconds to the time since the start."""
        self.rows += rows
        self.seconds.fill_(time.perf_counter() - self._began)

    def compute(self) -> Tensor:
        """Return rows per second. Raises `ValueError` without rows."""
        check_some_rows(self, self.rows)
        return self.rows / self.seconds

"""Metrics of single rows, over all ranks: AUC, log loss, RMSE; and how many rows a second are trained.

All are torchmetrics metrics: `update` with each batch on each rank, `compute` on all ranks, which gives every rank the
same number, that of all rows. Without a process group they are of the rows of this process. Make them on the device
that predictions are on: ``AUC().to(device)``. ::

    auc, speed = AUC(), Throughput()
    for batch in loader:
        auc.update(model(batch), batch["liked"])
        speed.update(len(batch["liked"]))
    print(auc.compute(), speed.compute())
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.utilities import dim_zero_cat

from .checks import check_some_rows, checked_labels, checked_rows


class AUC(Metric):
    """Area under the ROC curve: how likely a liked row is ranked above one that is not; ties count half.

    Exact, in double precision: keeps the predictions of all rows, and `compute` brings those of all ranks to each.
    (torchmetrics' own `BinaryAUROC` sums in single precision, and squashes the batches that look like logits to it.)

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import AUC
        >>> auc = AUC()
        >>> auc.update(torch.tensor([0.9, 0.6]), torch.tensor([1, 0]))  # a batch
        >>> auc.update(torch.tensor([0.4, 0.2]), torch.tensor([1, 0]))
        >>> float(auc.compute())
        0.75
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] | Tensor
        self.labels: list[Tensor] | Tensor
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take rows in.

        Args:
            preds: Scores, one per row, higher for what is liked more.
            target: Labels, one per row: 0 or 1, or booleans.

        Raises:
            ValueError: Their numbers differ, they have several columns, a score is not finite, or a label is something
                else.
        """
        preds, target = checked_rows(preds, target)
        labels = checked_labels(target)
        self.scores.append(preds.double())  # type: ignore[union-attr]
        self.labels.append(labels.to(torch.uint8))  # type: ignore[union-attr]

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Bring the rows of all ranks together. A rank without rows gives none of the same dtype, or gloo aborts."""
        if not len(self.scores):
            self.scores = [torch.empty(0, dtype=torch.float64, device=self.device)]
            self.labels = [torch.empty(0, dtype=torch.uint8, device=self.device)]
        super().sync(*args, **kwargs)

    def compute(self) -> Tensor:
        """The AUC of all rows of all ranks, 0 to 1. Raises `ValueError` where there are none, or of one label only."""
        check_some_rows(self, len(self.scores))
        scores, labels = dim_zero_cat(self.scores), dim_zero_cat(self.labels)
        check_some_rows(self, len(scores))
        positives = int(labels.sum(dtype=torch.int64))
        negatives = len(labels) - positives
        if not positives or not negatives:
            raise ValueError(f"AUC of {len(labels)} rows with {positives} labels of 1: it needs both labels")
        # Mann and Whitney: by the ranks of the liked rows; equal scores share the mean of theirs.
        _, group, counts = scores.unique(return_inverse=True, return_counts=True)
        ranks = counts.cumsum(0) - (counts.double() - 1) / 2
        liked = group.bincount(weights=labels.double())
        wins: Tensor = (liked * ranks).sum() - positives * (positives + 1) / 2
        return wins / (positives * negatives)


class LogLoss(Metric):
    """Mean negative log likelihood of labels, in nats.

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

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(self, logits: bool = False) -> None:
        super().__init__()
        self.logits = logits
        self.total: Tensor
        self.rows: Tensor
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take rows in. A wrong prediction of exactly 0 or 1 counts as 100.

        Args:
            preds: Probabilities or, with `logits`, logits, one per row.
            target: Labels, one per row: 0 or 1, or booleans.

        Raises:
            ValueError: As for `AUC.update`; and where probabilities are outside 0 to 1.
        """
        preds, target = checked_rows(preds, target)
        labels = checked_labels(target).double()
        if self.logits:
            losses = torch.nn.functional.binary_cross_entropy_with_logits(preds.double(), labels, reduction="sum")
        else:
            if len(preds) and not 0 <= float(preds.min()) <= float(preds.max()) <= 1:
                raise ValueError("predictions are not probabilities: give sigmoid(predictions), or say logits=True")
            losses = torch.nn.functional.binary_cross_entropy(preds.double(), labels, reduction="sum")
        self.total += losses
        self.rows += len(labels)

    def compute(self) -> Tensor:
        """The mean over all rows of all ranks. Raises `ValueError` where there are none."""
        check_some_rows(self, self.rows)
        return self.total / self.rows


class RMSE(MeanSquaredError):
    """Root mean squared error, in the unit of the targets.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.metrics import RMSE
        >>> rmse = RMSE()
        >>> rmse.update(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 5.0]))
        >>> float(rmse.compute())
        1.0
    """

    def __init__(self) -> None:
        super().__init__(squared=False)
        # Float32 sums stop growing at some ten million rows.
        self.add_state("sum_squared_error", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take rows in.

        Args:
            preds: Predictions, one per row.
            target: What they should have been.

        Raises:
            ValueError: Their numbers differ, they have several columns, or one of them is not finite.
        """
        preds, target = checked_rows(preds, target)
        super().update(preds.double(), target.double())

    def compute(self) -> Tensor:
        """Over all rows of all ranks. Raises `ValueError` where there are none."""
        check_some_rows(self, self.total)
        return super().compute()


class Throughput(Metric):
    """Rows per second of all ranks together: all their rows, by the time of the slowest rank.

    The time is that from making the metric, or `reset`, to the last `update`; on a GPU work may still be under way
    then: call `torch.cuda.synchronize()` before the last one.

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
        """Begin anew, with the clock at 0."""
        super().reset()
        self._began = time.perf_counter()

    def update(self, rows: int) -> None:
        """Count `rows` rows as done by now."""
        self.rows += rows
        self.seconds.fill_(time.perf_counter() - self._began)

    def compute(self) -> Tensor:
        """Rows per second. Raises `ValueError` where there were none."""
        check_some_rows(self, self.rows)
        return self.rows / self.seconds

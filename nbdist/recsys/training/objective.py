"""The objective of a training: a loss of one task or of several, and the weights of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from .. import ranks
from ..loader.base import Loader
from .batch_loss import batch_loss, not_finite

Loss: TypeAlias = Callable[..., Tensor]
"""A function of predictions (float32) and targets that returns the mean loss over the rows. If there are numeric
weights, they are its third argument."""

ONLY = ""
"""The name of the task of a model whose tasks have no names."""


def log_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean negative log likelihood of labels, weighted by the weights of the rows.

    Args:
        logits: The logits, shape (rows,).
        labels: The labels, 0 or 1, or between them, of any dtype; shape (rows,).
        weights: The weights of the rows, above 0. None: 1 for each row.

    Raises:
        ValueError: On a CPU, a label is below 0 or above 1: the loss would have no minimum.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.training import log_loss
        >>> log_loss(torch.tensor([0.0, 9.0]), torch.tensor([True, False]), torch.tensor([1.0, 0.0]))
        tensor(0.6931)
    """
    if labels.device.type == "cpu" and labels.dtype != torch.bool:  # a GPU would have to be waited for
        wrong = ((labels < 0) | (labels > 1)).nonzero()
        if len(wrong):
            row = wrong[0].tolist()
            raise ValueError(
                f"labels must be 0 or 1, or between them, got {labels[tuple(row)].item()} in row {row[0]}: map them to "
                "these, or give another `loss`"
            )
    labels = labels.to(logits.dtype)
    if weights is None:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)
    each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return each @ (weights / weights.sum()).to(each.dtype)


@dataclass(frozen=True)
class Objective:
    """The loss of each task, and the columns with the weights of rows."""

    losses: Mapping[str, Loss]
    """The loss function of each task. Its name is `ONLY` if tasks have no names."""
    columns: Mapping[str, str]
    """For each task that has weights, the column of a batch with the weights of the rows."""

    @property
    def simple(self) -> bool:
        """True for one task without weights."""
        return list(self.losses) == [ONLY] and not self.columns

    def weights(self, batches: Sequence[tuple[int, Any]], sizes: Sequence[int], device: torch.device) -> Tensor | None:
        """Return, for each task, the sum of the weights of all ranks' rows in a step, float64; None for one task
        without weights. All ranks must call it.

        Args:
            batches: This rank's batches of the step, each with its number in the epoch.
            sizes: The numbers of rows of all batches of the epoch.
            device: The device of the result.
        """
        if self.simple:
            return None
        found = torch.zeros(len(self.losses), dtype=torch.float64, device=device)
        for i, task in enumerate(self.losses):
            for number, batch in batches:
                weights = weights_of(batch, self.columns.get(task))
                found[i] += sizes[number] if weights is None else weights.sum(dtype=torch.float64)
        dist.all_reduce(found)
        return found

    def of(self, found: Mapping[str, Sequence[Any]], batch: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Return, for each task, its loss, which is the weighted mean over the rows of a batch, and the sum of the
        weights.

        Args:
            found: The result of `predict`, by task.
            batch: The batch.
        """
        self.check(found)
        results: list[tuple[Tensor, Tensor | None]] = []
        for task, loss in self.losses.items():
            (predictions, targets, *_), weights = weighted(found[task], batch, self.columns.get(task))
            total = None if weights is None else weights.sum(dtype=torch.float64)
            if weights is not None and weights.dtype == torch.bool:
                weights = None
            if weights is not None:
                _check_third(task, loss)
            results.append((batch_loss(loss, predictions, targets, weights), total))
        return results

    def part(
        self, found: Mapping[str, Sequence[Any]], batch: Any, size: int, totals: Tensor, step: int | None
    ) -> Tensor:
        """Return the contribution of a batch to the loss of a step: each task's weighted mean over the rows of all
        ranks.

        Args:
            found: The result of `predict`, by task.
            batch: The batch.
            size: The number of rows of the batch.
            totals: For each task, the sum of the weights of all rows of the step.
            step: The number of the step, for the error about a loss on a CPU that is not finite. None: the loss is not
                checked.
        """
        parts = []
        for (task, (loss, mine)), total in zip(
            zip(self.losses, self.of(found, batch), strict=True), totals, strict=True
        ):
            if step is not None and loss.device.type == "cpu" and not loss.isfinite():
                raise not_finite(step, ranks.rank(), found[task][0], found[task][1], task)
            own = total.new_tensor(float(size)) if mine is None else mine
            parts.append(loss * (own / total.clamp(min=torch.finfo(total.dtype).tiny)).to(loss.dtype))
        return torch.stack(parts).sum()

    def check(self, found: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless `predict` has returned these tasks."""
        if found.keys() != self.losses.keys():
            raise ValueError(
                f"`predict` must return {_named(self.losses)}, like `loss`, got {_named(found)}: if `loss` is a dict "
                "from task to loss, `predict` returns a dict from task to predictions and targets"
            )


@dataclass(frozen=True)
class Evaluation:
    """The evaluations of a run."""

    valid: Loader | None
    """The loader of the rows. None: there are no evaluations."""
    metrics: Mapping[str, Metric]
    """The metrics, by name."""
    tasks: Mapping[str, str]
    """The task of each metric, by the metric's name."""
    patience: int | None
    """The number of evaluations without an improvement after which the run ends. None: any number."""
    batches: int | None
    """The number of batches of each rank in an evaluation. None: all."""


def objective(loss: Loss | Mapping[str, Loss], sample_weight: str | Mapping[str, str] | None) -> Objective:
    """Return the objective for the arguments of `fit`.

    Raises:
        TypeError: `loss` or `sample_weight` has a wrong type.
        ValueError: There are weights for a task that has no loss.
    """
    losses = dict(loss) if isinstance(loss, Mapping) else {ONLY: loss}
    if not losses or not all(isinstance(task, str) and callable(one) for task, one in losses.items()):
        raise TypeError(f"`loss` must be a function, or a dict from task to function, got {loss!r}")
    if isinstance(loss, Mapping) and any(not task or "/" in task for task in losses):
        raise ValueError(f"tasks of `loss` must have names without '/', got {', '.join(map(repr, losses))}")
    columns = dict(columns_of(sample_weight, losses))
    if foreign := columns.keys() - losses.keys():
        raise ValueError(f"`sample_weight` has {min(foreign)!r}, which is no task of `loss`: {_named(losses)}")
    return Objective(losses, columns)


def columns_of(sample_weight: str | Mapping[str, str] | None, tasks: Any) -> dict[str, str]:
    """Return the column of weights of each task, from the option `sample_weight`."""
    if sample_weight is None:
        return {}
    if isinstance(sample_weight, str):
        return dict.fromkeys(tasks, sample_weight)
    if not isinstance(sample_weight, Mapping) or not all(isinstance(one, str) for one in sample_weight.values()):
        raise TypeError(f"`sample_weight` must be a column, or a dict from task to column, got {sample_weight!r}")
    return dict(sample_weight)


def by_task(metrics: Any) -> tuple[dict[str, Metric], dict[str, str]]:
    """Return the metrics and the tasks, by the name of the metric. The names of metrics of named tasks are
    "task/name"."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dict from name to metric, got {type(metrics).__name__}")
    nested = [name for name, one in metrics.items() if isinstance(one, Mapping)]
    if not nested:
        return dict(metrics), dict.fromkeys(metrics, ONLY)
    if len(nested) < len(metrics):
        raise TypeError(f"`metrics` must have a dict for each task, as for {nested[0]!r}, or no tasks at all")
    flat = {(task, name): metric for task, some in metrics.items() for name, metric in some.items()}
    return {f"{task}/{name}": one for (task, name), one in flat.items()}, {f"{t}/{name}": t for t, name in flat}


def weighted(found: Sequence[Any], batch: Any, column: str | None) -> tuple[list[Any], Tensor | None]:
    """Return the rows of a task's predictions, targets and further results whose weight is above 0, and these
    weights."""
    weights = weights_of(batch, column)
    if weights is None:
        return list(found), None
    if len(weights) != len(found[0]):
        raise ValueError(
            f"`sample_weight`: column {column!r} has {len(weights)} rows, and `predict` returned predictions for "
            f"{len(found[0])}"
        )
    if len(found) == 4:
        raise ValueError("weights must be given once: `predict` returns some, and `sample_weight` has others")
    rows = (weights > 0).nonzero()[:, 0]  # what is masked may be NaN
    return [None if one is None else one[rows] for one in found], weights[rows]


def weights_of(batch: Any, column: str | None) -> Tensor | None:
    """Return the weights of a batch's rows, booleans or numbers; None if there are none.

    Raises:
        ValueError: The column is missing, or has values other than a number of at least 0 for each row.
    """
    if column is None:
        return None
    weights = batch.get(column) if isinstance(batch, Mapping) else None
    if not isinstance(weights, Tensor) or weights.ndim != 1:
        there = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"`sample_weight`: the batch has no column {column!r} with one number per row; its columns are {there}"
        )
    if weights.dtype == torch.bool:
        return weights
    weights = weights.float()
    bad = (~(weights.isfinite() & (weights >= 0))).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        raise ValueError(f"`sample_weight`: weights must be at least 0, got {float(weights[row])} in row {row}")
    return weights


def _check_third(task: str, loss: Loss) -> None:
    try:
        inspect.signature(loss).bind(None, None, None)
    except TypeError:
        where = f"`loss` of {task!r}" if task else "`loss`"
        raise TypeError(
            f"{where} must take predictions, targets and weights if weights are numbers, and return the weighted mean; "
            "with booleans, which select rows, it takes only the first two"
        ) from None
    except ValueError:  # a function without a signature
        return


def _named(tasks: Mapping[str, Any]) -> str:
    return "no named tasks" if list(tasks) == [ONLY] else f"the tasks {', '.join(tasks)}"

"""Predictions of a model for batches, and metrics over all ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.retrieval.base import RetrievalMetric
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from ...devices import collective_device
from ...system.annotations import annotated
from .. import ranks
from ..loader.base import Loader
from ..loader.foreign_ids import foreign_ids
from ..metrics.ranking import Grouped
from ..metrics.rows import AUC, RMSE, LogLoss, Throughput
from ..parallel.protocol import Parallel
from .objective import ONLY, Evaluation, by_task, columns_of, weighted, weights_of

_Found: TypeAlias = (
    "tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None, Tensor]"
)
Predict: TypeAlias = Callable[[nn.Module, Any], "_Found | Mapping[str, _Found]"]
"""A function of a model and a batch. It returns predictions, such as logits of shape (rows,), and targets. A third
result, for metrics of ranked rows such as `NDCG`, is the group of each row, such as its user: integers, shape (rows,).
A fourth result, for metrics with weights, is the weight of each row. For several tasks, it returns a dict from task to
these."""

Precision: TypeAlias = Literal["bf16", "fp16", "fp32"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_metrics(metrics: Mapping[str, Metric], others: Collection[str] = ()) -> None:
    """Raise `TypeError` unless `metrics` is a dict of metrics, and `ValueError` for a name that the answer has among
    its `others`."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dict from name to metric, got {type(metrics).__name__}")
    for name, metric in metrics.items():
        if name in others:
            raise ValueError(f"`metrics` must have other names than {', '.join(others)}, got {name!r}")
        if not isinstance(metric, Metric):
            raise TypeError(f"`metrics` must have metrics such as AUC(), got {metric!r} for {name!r}")
        if isinstance(metric, Throughput):
            raise TypeError(
                f"`metrics` must have metrics of predictions, got Throughput() for {name!r}: each record of fit() has "
                "rows_per_second, and a loop of your own can call Throughput.update"
            )


def check_precision(precision: str | None) -> None:
    """Raise `ValueError` for a value that is not a `Precision`, and for bf16 on a GPU without hardware for it."""
    if precision not in (None, "fp32", *_AUTOCAST):
        raise ValueError(f'`precision` must be "bf16", "fp16", "fp32" or None, got {precision!r}')
    if precision != "bf16" or collective_device().type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):  # which is slower than float32
        raise ValueError(
            f'`precision` must be "fp16" or "fp32" on rank {ranks.rank()}, whose GPU, {torch.cuda.get_device_name()}, '
            'has no bfloat16 in hardware, got "bf16"'
        )


def evaluate(
    model: Parallel | nn.Module,
    predict: Predict,
    loader: Loader,
    metrics: Mapping[str, Metric] | Mapping[str, Mapping[str, Metric]],
    *,
    sample_weight: str | Mapping[str, str] | None = None,
    precision: Precision | None = None,
) -> dict[str, float]:
    """Return the metrics of a model over all rows of a loader, on all ranks. The model is in evaluation mode.

    Each row counts once, even if the loader repeats some (``remainder="pad"``).

    All ranks must call it, and all get the same numbers.

    Args:
        model: The result of `shard` or `replicate`, as for `fit`; or a plain module.
        predict: A function of the model and a batch. It returns predictions (converted to float32 for the metrics) and
            targets; for metrics of ranked rows (`Recall`, `NDCG`, `HitRate`, `MRR`) also the users; and, after the
            users or None, optionally the weights of the rows. For several tasks, it returns a dict from task to these.
        loader: The loader of the rows, on the model's device. Each rank has its share.
        metrics: The metrics, by name. They are moved to the rank's device and reset first. For several tasks: a dict
            from task to metrics by name.
        sample_weight: The name of a column with the weight of each row, or with booleans that select rows; or a dict
            from task to column. None: each row counts once, or by the weights that `predict` returns.
        precision: "bf16" or "fp16": `predict` runs under autocast to bfloat16 or float16. "fp32" or None: without
            autocast.

    Returns:
        The values, by the name of the metric; for several tasks, by "task/name".

    Raises:
        ValueError: The process is in no process group; `precision` is invalid, or "bf16" on a GPU without it;
            predictions are NaN, or a metric refuses them; or a metric cannot be computed for the rows, such as an AUC
            if all labels are equal.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.metrics import RMSE
        >>> from nbdist.recsys.training import evaluate
        >>> def predict(model, batch):
        ...     return model(batch["x"]), batch["y"]
        >>> def error():
        ...     x = torch.arange(10.0)
        ...     rows = MemoryLoader({"x": x, "y": x + 1}, 2)
        ...     return evaluate(torch.nn.Identity(), predict, rows, {"rmse": RMSE()})
        >>> in_ddp(2, error)
        {'rmse': 1.0}
    """
    check_precision(precision)
    named, tasks = by_task(metrics)
    check_metrics(named)
    module = model if isinstance(model, nn.Module) else model.model
    columns = columns_of(sample_weight, dict.fromkeys(tasks.values()))
    whole = Evaluation(loader, named, tasks, None, None)
    values, failed = measure(module, predict, loader, whole, precision, columns)
    for name, why in failed.items():
        raise ValueError(f"{name}: {why}")
    return values


def measure(
    model: nn.Module,
    predict: Predict,
    loader: Loader,
    evaluation: Evaluation,
    precision: Precision | None,
    columns: Mapping[str, str],
) -> tuple[dict[str, float], dict[str, str]]:
    """Evaluate like `evaluate`, but return NaN for metrics that cannot be computed, and the reasons.

    Args:
        model: The module.
        predict: As for `evaluate`.
        loader: The loader of the rows.
        evaluation: The metrics, and the number of batches to evaluate.
        precision: As for `evaluate`.
        columns: The column of weights of each task.
    """
    metrics, tasks = evaluation.metrics, evaluation.tasks
    reset(metrics)
    with evaluating(model), annotated("nbdist:evaluate"):
        for batch in itertools.islice(loader, evaluation.batches):
            add_rows(metrics, predicted(model, predict, batch, precision), batch, tasks, columns, loader.repeats)
    return computed(metrics)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, inside `with`."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def reset(metrics: Mapping[str, Metric]) -> None:
    """Put metrics on the rank's device, without rows."""
    for metric in metrics.values():
        metric.to(collective_device()).reset()


def add_rows(
    metrics: Mapping[str, Metric],
    everything: Mapping[str, Sequence[Any]],
    batch: Any,
    tasks: Mapping[str, str],
    columns: Mapping[str, str],
    repeats: int = 0,
) -> None:
    """Add the rows of a batch to metrics.

    Args:
        metrics: Name → metric.
        everything: The result of `predicted`.
        batch: The columns.
        tasks: Name → the task of the metric.
        columns: Task → column of weights.
        repeats: The number of rows at the end that do not count.
    """
    if missing := {*tasks.values()} - everything.keys():
        raise ValueError(
            f"`metrics` and `predict` must have the same tasks, got metrics of {min(missing)!r} and "
            f"predictions of {', '.join(map(repr, everything))}"
        )
    for task, (predictions, *others) in everything.items():
        rows, weights = weighted((predictions, *others), batch, columns.get(task))
        if repeats:
            last = len(predictions) - repeats
            kept = last if weights is None else int((weights_of(batch, columns[task])[:last] > 0).sum())  # type: ignore[index]
            rows = [None if one is None else one[:kept] for one in rows]
            weights = None if weights is None else weights[:kept]
        if weights is not None and weights.dtype != torch.bool:
            rows = [*rows, *[None] * (3 - len(rows)), weights]
        for name, metric in metrics.items():
            if tasks[name] == task:
                update(name, metric, *rows)
        _check_numbers(rows[0])


def computed(metrics: Mapping[str, Metric]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics of the rows of all ranks, NaN for those that cannot be computed; and for these the reason."""
    results, failed = dict.fromkeys(metrics, math.nan), {}
    for name, metric in metrics.items():
        try:
            results[name] = float(metric.compute())
        except ValueError as error:
            failed[name] = str(error)
            with contextlib.suppress(TorchMetricsUserError):  # where it has not got as far
                metric.unsync()  # it would go on with the rows of all ranks, and could not be reset
    values = torch.tensor(list(results.values()), dtype=torch.float64, device=collective_device())
    dist.broadcast(values, src=0)  # ranks that stop by them must not differ in the last bit, as sums on a GPU may
    return dict(zip(metrics, values.tolist(), strict=True)), ranks.on_rank_0(lambda: failed)


def _check_numbers(predictions: Tensor) -> None:
    """Raise `ValueError` for predictions that are NaN, because metrics of other libraries do not check this."""
    missing = predictions.isnan()
    if missing.any():
        raise ValueError(
            f"predictions must be numbers, got NaN in row {int(missing.nonzero()[0, 0])} of a batch of rank "
            f"{ranks.rank()}"
        )


def update(
    name: str, metric: Metric, predictions: Tensor, targets: Tensor, users: Tensor | None = None, *weights: Tensor
) -> None:
    """Add rows to a metric, with the arguments that its `update` takes."""
    rows = [predictions, targets]
    if isinstance(metric, (Grouped, RetrievalMetric)):
        if users is None:
            raise TypeError(
                f"{name}: {type(metric).__name__} ranks the rows of each user, so `predict` must also return the "
                "users: "
                "predictions, targets, users"
            )
        rows.append(users)
    if weights and not isinstance(metric, (Grouped, AUC, LogLoss, RMSE)):
        raise TypeError(f"{name}: {type(metric).__name__} takes no weights, but `predict` returns some")
    metric.update(*rows, *weights)


def predicted(
    model: nn.Module, predict: Predict, batch: Any, precision: Precision | None
) -> dict[str, tuple[Any, ...]]:
    """Return the predictions of each task, in single precision, and the targets of a batch; and users and weights, if
    `predict` returns them. If tasks have no names, the only one has the name `ONLY`."""
    half = _AUTOCAST.get(precision or "fp32")
    with torch.autocast(collective_device().type, half) if half is not None else contextlib.nullcontext():
        try:
            found: Any = predict(model, batch)
        except IndexError as error:
            if (why := foreign_ids(model, batch)) is None:
                raise
            raise ValueError(f"{why} of the batch of rank {ranks.rank()}") from error
    by_name = found if isinstance(found, Mapping) else {ONLY: found}
    return {task: _checked(task, one) for task, one in by_name.items()}


def forward(model: nn.Module, predict: Predict, batch: Any, precision: Precision | None) -> tuple[Any, ...]:
    """Return the part of the result of `predicted` for a model with one task.

    Raises:
        ValueError: The tasks have names.
    """
    found = predicted(model, predict, batch, precision)
    if list(found) != [ONLY]:
        raise ValueError(
            f"`predict` returns the tasks {', '.join(found)}: give a dict from task to loss, such as "
            f"loss={{{next(iter(found), 'task')!r}: log_loss}}"
        )
    return found[ONLY]


def _checked(task: str, found: Any) -> tuple[Any, ...]:
    if not isinstance(found, (tuple, list)) or not 2 <= len(found) <= 4 or not isinstance(found[0], Tensor):
        kinds = ", ".join(type(one).__name__ for one in found) if isinstance(found, (tuple, list)) else ""
        raise TypeError(
            f"`predict` must return tensors{f' for {task!r}' if task else ''}: predictions and targets, maybe users "
            f"and weights, got {type(found).__name__}" + (f" of {kinds}" if kinds else "")
        )
    predictions, *others = found
    return predictions.float(), *others

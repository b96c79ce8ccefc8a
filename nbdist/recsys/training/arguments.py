"""Checks of the arguments of `fit`, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from ...devices import collective_device
from .. import ranks
from ..loader.base import Loader
from ..metrics import AUC, LogLoss
from ..parallel.protocol import Parallel
from ..parallel.replicated import Replicated
from .evaluation import Precision, check_metrics, check_precision
from .history import NUMBERS
from .objective import ONLY, Evaluation, Objective, by_task, log_loss
from .schedule import Schedule
from .snapshots import Snapshots


def check_model(model: Any) -> None:
    """Raise an error unless this process is a rank, and the model can be trained."""
    if not dist.is_initialized():
        raise RuntimeError("fit() works in a rank: call it in a function that in_ddp or a Session runs")
    if isinstance(model, nn.Module) or not hasattr(model, "_fused"):
        raise TypeError(f"`model` must be the result of shard() or replicate(), got {type(model).__name__}")


def check_options(
    model: Parallel,
    precision: Precision | None,
    max_grad_norm: float | None,
    gradient_accumulation_steps: int,
    check: str | None,
    schedule: Schedule | None,
) -> None:
    """Raise an error unless the options of the steps fit the model."""
    if schedule is not None and not callable(schedule):
        raise TypeError(
            f"`schedule` must be a function from step to a factor of the learning rates, got {schedule!r}: the rates "
            "themselves belong to the optimizer"
        )
    if check not in (None, "nan"):
        raise ValueError(f'`check` must be "nan" or None, got {check!r}')
    check_precision(precision)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"`max_grad_norm` must be above 0, got {max_grad_norm}")
    if model._fused and (max_grad_norm is not None or gradient_accumulation_steps > 1):
        what = "max_grad_norm=" if max_grad_norm is not None else "gradient_accumulation_steps="
        raise ValueError(
            f"{what} must know all gradients before tables change, but tables of this model are updated in the "
            "backward pass: use shard(..., fused=False)"
        )
    if precision == "fp16" and not isinstance(model, Replicated):
        raise ValueError(
            '`precision` must be "bf16" or "fp32" for a model that is sharded, got "fp16": its tables would be updated '
            "by scaled gradients. GPUs that TorchRec works on have bfloat16"
        )
    if precision == "fp16" and isinstance(model, Replicated) and model._raw is not None:
        raise ValueError(
            '`precision` must be "bf16" or "fp32" for a model with tables of raw ids, got "fp16": their gradients '
            "would stay scaled"
        )


def evaluation_of(
    goal: Objective,
    valid: Loader | None,
    metrics: Mapping[str, Any] | None,
    patience: int | None,
    batches: int | None,
) -> Evaluation:
    """Return the evaluations. Without `metrics`, they have the metrics of click models for each task.

    Raises:
        ValueError: A loss function of the user is given without metrics, or a task has metrics but no loss.
    """
    default = metrics is None
    if metrics is None:
        if valid is not None and any(one is not log_loss for one in goal.losses.values()):
            raise ValueError('a loss of your own needs metrics, such as metrics={"rmse": RMSE()}')
        found = {task: {"valid_loss": LogLoss(logits=True), "auc": AUC()} for task in goal.losses}
        metrics = found.get(ONLY, found)
    flat, tasks = by_task(metrics)
    if valid is None and flat and not default:
        raise ValueError("`valid` must be given where `metrics` is, got None: they are measured on its rows")
    if valid is not None and (foreign := {*tasks.values()} - goal.losses.keys()):
        raise ValueError(f"`metrics` and `loss` must have the same tasks, got metrics of {min(foreign)!r} alone")
    return Evaluation(valid, flat, tasks, patience, batches)


def sends_ahead(model: Parallel, train: Loader, pipelined: bool | None) -> bool:
    """Return whether the ids of the next batch are sent during the backward pass of the current batch."""
    if pipelined is None:
        pipelined = collective_device().type == "cuda"
    return pipelined and model._ahead is not None and bool(train.keyed) and train.transform is None


def check_run(
    train: Loader,
    valid: Loader | None,
    counts: Mapping[str, int | None],
    metrics: Mapping[str, Metric],
    snapshots: Snapshots | None,
) -> None:
    """Raise an error unless counts, loaders, metrics and snapshots fit together."""
    if (counts["steps"] is None) == (counts["epochs"] is None):
        raise ValueError("give either steps= or epochs=")
    for name, value in counts.items():
        if value is not None and (not hasattr(value, "__index__") or value < 1):
            raise ValueError(f"`{name}` must be an integer, at least 1, got {value!r}")
    check_metrics(metrics, NUMBERS)
    for name, loader in (("train", train), ("valid", valid)):
        if loader is not None and not isinstance(loader, Loader):
            raise TypeError(
                f"{name} is a {type(loader).__name__}: a ParquetLoader or MemoryLoader is needed, which divides the "
                "rows among the ranks and can be resumed. For others, write the loop yourself; evaluate() helps"
            )
    if valid is not None and valid.remainder == "drop":
        raise ValueError("valid has remainder='drop', so that rows are left out: make it with 'keep' or 'pad'")
    for name in ("patience", "eval_every", "eval_batches"):
        if counts[name] is not None and (valid is None or not metrics):
            raise ValueError(f"`{name}` needs `valid` and a metric")
    if snapshots and snapshots.keep_best and (valid is None or snapshots.keep_best not in metrics):
        raise ValueError(
            f"keep_best must be one of the metrics, {', '.join(metrics)}, and valid= must be given, "
            f"got {snapshots.keep_best!r}"
        )
    by_patience = list(metrics)[-1] if counts["patience"] is not None else None
    for option, chosen in (("keep_best", snapshots and snapshots.keep_best), ("patience", by_patience)):
        if chosen and metrics[chosen].higher_is_better is None:
            raise ValueError(
                f"{option}= uses {chosen!r}, and {type(metrics[chosen]).__name__} does not define whether larger "
                "values "
                "are better: set higher_is_better of its class to True or False"
            )


def check_steps(loader: Loader) -> None:
    """Raise `ValueError` if the loaders of the ranks have different numbers of steps, with which ranks would wait
    forever."""
    lengths = ranks.all_gather(len(loader))
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise ValueError(
                f"the loader of rank 0 has {lengths[0]} steps and that of rank {rank} has {length}: with unequal parts "
                "ranks would wait for one another forever. Let one loader divide all rows, or make the parts equal"
            )

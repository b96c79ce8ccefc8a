"""Metrics of a model by segments of the rows, with intervals."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ...checks import check_count
from .. import ranks
from ..loader.base import Loader
from ..parallel.protocol import Parallel
from .evaluation import Precision, Predict, check_metrics, check_precision, evaluating, forward, update


def evaluate_by(
    model: Parallel | nn.Module,
    predict: Predict,
    loader: Loader,
    metrics: Mapping[str, Metric],
    by: str,
    *,
    resamples: int = 200,
    seed: int = 0,
    precision: Precision | None = None,
) -> pl.DataFrame:
    """Return the metrics of each segment of the rows, with intervals. All ranks must call it, and get the same frame.

    Intervals are percentiles of the bootstrap, which draws rows; where `predict` returns users, it draws users, with
    all their rows. Rank 0 computes them, from the predictions of all ranks.

    Args:
        model, predict, loader, precision: As for `evaluate`; with one task.
        metrics: Name → metric.
        by: The column of a batch with the segment of each row: integers, booleans or floats, shape (rows,).
        resamples: The number of draws for an interval.
        seed: The seed of the draws.

    Returns:
        A row for each segment, in the order of their values: `by`, `rows`, and for each metric its value, and " low"
        and " high", the bounds of the 95 % interval. A metric that cannot be computed for a segment, such as the AUC of
        rows with one label, is NaN. Draws for which it cannot be computed are left out.

    Raises:
        ImportError: SciPy is not installed.
        ValueError: A batch has no such column, or the predictions are of several tasks.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.metrics import RMSE
        >>> from nbdist.recsys.training import evaluate_by
        >>> def predict(model, batch):
        ...     return model(batch["x"]), batch["y"]
        >>> def errors():
        ...     x = torch.arange(10.0)
        ...     rows = MemoryLoader({"x": x, "y": x + 1 + (x > 4), "large": x > 4}, 2)
        ...     return evaluate_by(torch.nn.Identity(), predict, rows, {"rmse": RMSE()}, "large")
        >>> in_ddp(2, errors).rows()
        [(False, 5, 1.0, 1.0, 1.0), (True, 5, 2.0, 2.0, 2.0)]
    """
    from scipy.stats import bootstrap  # noqa: F401  # before the model is asked

    check_precision(precision)
    check_metrics(metrics, ["rows"])
    check_count(resamples, least=2, name="`resamples`")
    check_count(seed, least=0, name="`seed`")
    answer = ["rows", *(f"{name}{end}" for name in metrics for end in ("", " low", " high"))]
    if by in answer:
        raise ValueError(f"`by` must have another name than the columns of the answer, {', '.join(answer)}, got {by!r}")
    module = model if isinstance(model, nn.Module) else model.model
    columns = _all_rows(module, predict, loader, by, precision)

    def table() -> pl.DataFrame:
        segments = columns[-1]
        assert segments is not None
        found = []
        for value in _values(segments):
            some = segments.isnan() if value.isnan() else segments == value
            part = [None if one is None else one[some] for one in columns[:-1]]
            row: dict[str, Any] = {by: value.item(), "rows": int(some.sum())}
            for name, metric in metrics.items():
                own = _alone(metric)
                low, high = _interval(name, own, part, resamples, seed)
                row |= {name: _value(name, own, part), f"{name} low": low, f"{name} high": high}
            found.append(row)
        return pl.DataFrame(found)

    return ranks.on_rank_0(table)


def _values(segments: Tensor) -> Tensor:
    """Return the distinct values in ascending order, NaN once, at the end."""
    values = segments.unique()
    nan = values.isnan()
    return torch.cat([values[~nan], values[nan][:1]])


def _all_rows(
    module: nn.Module, predict: Predict, loader: Loader, by: str, precision: Precision | None
) -> list[Tensor | None]:
    """Return predictions, targets, users, weights and segments of all ranks' rows, on the CPU; None in place of users
    or weights if there are none.
    """
    parts: list[list[Tensor | None]] = []
    with evaluating(module):
        for batch in loader:
            segment = batch.get(by) if isinstance(batch, Mapping) else None
            if not isinstance(segment, Tensor) or segment.ndim != 1:
                raise ValueError(f"`by`: the batch has no column {by!r} with one number per row")
            found = [*forward(module, predict, batch, precision), None, None][:4]
            kept = len(segment) - loader.repeats
            parts.append([None if one is None else one[:kept].cpu() for one in (*found, segment)])
    mine = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    everyone = zip(*ranks.all_gather(mine), strict=True)
    return [None if column[0] is None else torch.cat(column) for column in everyone]


def _alone(metric: Metric) -> Metric:
    """Return a copy of a metric that is computed over the rows of this process alone."""
    found = copy.deepcopy(metric).cpu()
    found.distributed_available_fn = _not_distributed
    return found


def _not_distributed() -> bool:
    return False


def _value(name: str, metric: Metric, rows: Sequence[Tensor | None]) -> float:
    metric.reset()
    predictions, targets, users, weights = rows
    assert predictions is not None and targets is not None
    try:
        update(name, metric, predictions, targets, users, *([] if weights is None else [weights]))
        return float(metric.compute())
    except ValueError:  # of such rows it cannot be computed
        return math.nan


def _interval(
    name: str, metric: Metric, rows: Sequence[Tensor | None], resamples: int, seed: int
) -> tuple[float, float]:
    """Return the bounds of the 95 % interval."""
    from scipy.stats import bootstrap

    users = rows[2]
    count = len(rows[0])  # type: ignore[arg-type]
    groups = [torch.arange(one, one + 1) for one in range(count)] if users is None else _rows_of_users(users)
    if len(groups) < 2:
        value = _value(name, metric, rows)
        return value, value

    def statistic(drawn: Any) -> float:
        chosen = [groups[one] for one in drawn.tolist()]
        places = torch.cat(chosen)
        some = [None if one is None else one[places] for one in rows]
        if users is not None:  # who is drawn twice is two users
            lengths = torch.tensor([len(one) for one in chosen])
            some[2] = torch.arange(len(chosen)).repeat_interleave(lengths)
        return _value(name, metric, some)

    drawn = bootstrap(
        (np.arange(len(groups)),),
        statistic,
        n_resamples=resamples,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).bootstrap_distribution
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn):
        return math.nan, math.nan
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def _rows_of_users(users: Tensor) -> list[Tensor]:
    _, numbers = users.unique(return_inverse=True)
    return list(numbers.argsort(stable=True).split(numbers.bincount().tolist()))

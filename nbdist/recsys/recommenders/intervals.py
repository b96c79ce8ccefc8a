"""The mean metrics of models over users, their confidence intervals, and a test against the best model."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

METRICS = ("recall", "ndcg", "mrr", "hit_rate")
LEVEL = 0.05
"""The p-value from which on a model counts as level with the best."""
#: Number of samples of users for an interval, and of signs for a test.
_RESAMPLES = 2000


def table_of(
    found: dict[str, dict[str, Tensor]], rows: list[dict[str, Any]], metric: str, k: int, seed: int
) -> pl.DataFrame:
    """Return a row for each model, the best first."""
    best = max(found, key=lambda name: float(found[name][metric].mean()))
    for row in rows:
        mine = found[row["model"]]
        for name in METRICS:
            low, high = interval(mine[name].numpy(), seed)
            row |= {f"{name}@{k}": float(mine[name].mean()), f"{name}@{k} low": low, f"{name}@{k} high": high}
        p = _p_value((found[best][metric] - mine[metric]).numpy(), seed)
        row["p_value"] = p
        row["verdict"] = "best" if row["model"] == best else "level" if p >= LEVEL else "behind"
    ordered = sorted(rows, key=lambda row: -row[f"{metric}@{k}"])
    first = ["model", *(f"{name}@{k}{end}" for name in METRICS for end in ("", " low", " high"))]
    return pl.DataFrame(ordered).select(*first, "p_value", "verdict", "trials", "parameters", "fit_seconds")


def table_by(found: dict[str, Tensor], segments: pl.Series, k: int, seed: int = 0) -> pl.DataFrame:
    """Return a row for each segment of users, with the means of metrics and their intervals; nulls come first."""
    rows = []
    for value in segments.unique().sort():
        some = (segments.is_null() if value is None else segments == value).fill_null(False).to_numpy()
        row: dict[str, Any] = {segments.name: value, "count": int(some.sum())}
        for name in METRICS:
            values = found[name].numpy()[some]
            low, high = interval(values, seed)
            row |= {f"{name}@{k}": float(values.mean()), f"{name}@{k} low": low, f"{name}@{k} high": high}
        rows.append(row)
    return pl.DataFrame(rows, schema_overrides={segments.name: segments.dtype})


def interval(values: Any, seed: int) -> tuple[float, float]:
    """Return the bounds of the 95 % confidence interval of a mean, by resampling users (bootstrap)."""
    from scipy.stats import bootstrap

    if len(values) < 2 or (values == values[0]).all():
        return float(values.mean()), float(values.mean())
    found = bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=200, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(found.low), float(found.high)


def _p_value(differences: Any, seed: int) -> float:
    """Return the p-value of a mean difference: a permutation test that draws the signs of the users' differences."""
    from scipy.stats import permutation_test

    if not differences.any():
        return 1.0
    return float(
        permutation_test(
            (differences,),
            np.mean,
            permutation_type="samples",
            n_resamples=_RESAMPLES,
            batch=200,
            rng=np.random.default_rng(seed),
        ).pvalue
    )

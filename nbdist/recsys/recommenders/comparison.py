"""Recommenders under one protocol: as many settings of each, metrics with intervals, and a test against the best."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor

from ...checks import check_choice, check_count, check_flag, check_mapping
from .. import ranks
from ..io.frames import Tabular
from ..loader.columns import Ragged
from ..metrics.ranked_items import per_user
from .base import Recommender
from .interactions import check_no_nulls, codes_of, columns_of
from .protocols import LeaveOneOut, SplitProtocol
from .spaces import Space, grid, number_of_settings, suggest

METRICS = ("recall", "ndcg", "mrr", "hit_rate")
#: Number of samples of users for an interval, and of signs for a test.
_RESAMPLES = 2000
_LEVEL = 0.05


class Fits(Protocol):
    """The two methods that `benchmark` needs of a recommender."""

    def fit(self, log: pl.DataFrame, *, user: str, item: str, time: str | None) -> Any:
        """Learn from a log."""
        ...

    def recommend(self, users: pl.Series, k: int) -> pl.DataFrame:
        """Return a row for each user, in order, with the column `items`: ids, the best first, none taken before."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A recommender of any kind, for `benchmark`.

    Args:
        make: Called with a value for each parameter of `space`; returns an object with `fit(log, *, user, item, time)`
            and `recommend(users, k)`, as `Recommender` has them.
        space: The values that are tried, by the name of the parameter.
    """

    make: Callable[..., Fits]
    space: Mapping[str, Space] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, name: str) -> Candidate:
        """Take a candidate, a subclass of `Recommender`, or a recommender whose parameters are chosen already."""
        if isinstance(model, Candidate):
            return model
        if isinstance(model, type) and issubclass(model, Recommender):
            return cls(model, model.SPACE)
        if hasattr(model, "fit") and hasattr(model, "recommend") and not isinstance(model, type):
            return cls(lambda: model)
        raise TypeError(
            f"model {name!r} must be a class such as EASE, a recommender, or a Candidate, got {type(model).__name__}"
        )


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `benchmark`."""

    table: pl.DataFrame
    """A row for each model, the best first: its name; each metric with the bounds of its interval (`low`, `high`);
    `p_value` and `verdict` of a test against the best; trials, the parameters chosen, and seconds of the last fit."""
    about: dict[str, Any]
    """Protocol, k, rows of each part, users and items measured, cold users, cold items, seed."""
    per_user: dict[str, pl.DataFrame] = field(repr=False)
    """For each model, the metrics of each user measured."""

    def to_markdown(self) -> str:
        """Return the table and what was measured, in Markdown."""
        shown = [f"{name}@{self.about['k']}" for name in METRICS[:3]]
        lines = [self._said(), "", f"| model | {' | '.join(shown)} | against the best | tried | chosen |"]
        lines.append("|---|" + "--:|" * len(shown) + "---|--:|---|")
        for row in self.table.iter_rows(named=True):
            cells = [f"{row[one]:.4f} ({row[f'{one} low']:.4f} to {row[f'{one} high']:.4f})" for one in shown]
            cells = [row["model"], *cells, row["verdict"], str(row["trials"]), row["parameters"] or "–"]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _said(self) -> str:
        a = self.about
        return (
            f"{a['protocol']}: {a['train']:,} rows to learn from, {a['valid']:,} that choose, {a['test']:,} to be "
            f"found, of {a['users']:,} users among {a['items']:,} items, without those taken before. Not "
            f"measured: {a['cold_users']:,} users who are new, {a['repeated']:,} rows that repeat what was taken. "
            f"Counted as missed: {a['cold_items']:,} rows of items that are new. Brackets: 95 % intervals over users. "
            f"Level: a paired test against the best has p ≥ {_LEVEL:g}."
        )

    def __repr__(self) -> str:
        shown = self.table.select("model", *(f"{name}@{self.about['k']}" for name in METRICS[:3]), "verdict")
        with pl.Config(tbl_rows=-1, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
            return f"{self._said()}\n{shown}"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def benchmark(
    models: Mapping[str, Any],
    log: Tabular,
    *,
    user: str = "user",
    item: str = "item",
    time: str = "timestamp",
    protocol: SplitProtocol | None = None,
    trials: int = 20,
    metric: str = "ndcg",
    k: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Compare recommenders on a log: each is tuned with the same number of trials, and all items are ranked.

    The rows that choose are then learned from, too, and the last rows are to be found. An item that a user has taken
    before is not recommended again, and rows that repeat one are not measured. In ranks, all of them call it with the
    same arguments; `EASE`, `IALS` and `ItemKNN` divide their work.

    Args:
        models: By name: classes such as `EASE`, recommenders whose parameters are chosen, or `Candidate`s.
        log: A row for each time that a user has taken an item.
        user: The column of users' ids.
        item: The column of items' ids.
        time: The column of times.
        protocol: `LeaveOneOut()` or `ByTime(valid, test)`. None: `LeaveOneOut()`.
        trials: Settings that are tried of each model, at most: a model with fewer is tried with each once.
        metric: What chooses among settings, and who is best: "recall", "ndcg", "mrr" or "hit_rate".
        k: The number of items for each user.
        seed: Of the search, the intervals and the tests.
        progress: Print a line after each model.

    Returns:
        The comparison: `table` is a frame; a notebook shows it with intervals.

    Raises:
        ImportError: optuna or SciPy is not installed.
        TypeError, ValueError: An argument or the log makes no sense.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.recommenders import EASE, Popularity, benchmark
        >>> rows = [(u, (u + i) % 7, i) for u in range(40) for i in range(4)]
        >>> log = pl.DataFrame(rows, schema=["user", "item", "timestamp"], orient="row")
        >>> found = benchmark({"EASE": EASE, "popularity": Popularity}, log, trials=3, k=2, progress=False)
        >>> found.table["model"].to_list(), found.table["verdict"].to_list()
        (['EASE', 'popularity'], ['best', 'behind'])
    """
    check_mapping(models, name="models", of="names to recommenders")
    if not models:
        raise ValueError("models must name at least one recommender, got none")
    candidates = {name: Candidate.of(model, name) for name, model in models.items()}
    check_count(trials, least=1, name="`trials`")
    check_count(k, least=1, name="`k`")
    check_count(seed, least=0, name="`seed`")
    check_choice(metric, METRICS, name="`metric`")
    check_flag(progress, name="`progress`")
    _require()
    task = _Task.of(columns_of(log, user, item, time), user, item, time, protocol or LeaveOneOut(), k)
    found, rows = {}, []
    for name, candidate in candidates.items():
        chosen, tried = _tuned(candidate, task, trials, metric, seed, name)
        model = candidate.make(**chosen)
        began = clock.perf_counter()
        found[name] = task.tested(model)
        rows.append(
            {
                "model": name,
                "trials": tried,
                "parameters": ", ".join(f"{key} {_short(value)}" for key, value in chosen.items()),
                "fit_seconds": clock.perf_counter() - began,
            }
        )
        if progress and ranks.rank() == 0:
            print(f"{name}: {metric}@{k} {float(found[name][metric].mean()):.4f}, {tried} settings tried", flush=True)
    table = _table(found, rows, metric, k, seed)
    about = {**task.about, "k": k, "seed": seed}
    return Comparison(
        table, about, {name: pl.DataFrame({m: v.numpy() for m, v in one.items()}) for name, one in found.items()}
    )


@dataclass(frozen=True, eq=False)
class _Task:
    """A log that has been divided, and how models are measured on it."""

    train: pl.DataFrame
    known: pl.DataFrame
    """Training and validation rows."""
    valid: pl.DataFrame
    test: pl.DataFrame
    names: tuple[str, str, str]
    k: int
    about: dict[str, Any]

    @classmethod
    def of(cls, log: pl.DataFrame, user: str, item: str, time: str, protocol: SplitProtocol, k: int) -> _Task:
        for name in (user, item):
            check_no_nulls(log[name])
        train, valid, test = protocol.split(log, user, time)
        known = pl.concat([train, valid])
        new = [
            part.join(before, on=[user, item], how="anti", maintain_order="left")
            for part, before in ((valid, train), (test, known))
        ]
        chooses, found = (
            part.join(before, on=user, how="semi", maintain_order="left")
            for part, before in zip(new, (train, known), strict=True)
        )
        for what, part in (("learn from", train), ("choose among settings by", chooses), ("be found", found)):
            if not len(part):
                raise ValueError(
                    f"`log` must have rows to {what}, got none in {len(log):,} rows under {protocol!r}: users who are "
                    f"known, and take what they did not take before"
                )
        about = {
            "protocol": repr(protocol),
            "train": len(train),
            "valid": len(chooses),
            "test": len(found),
            "users": found[user].n_unique(),
            "items": known[item].n_unique(),
            "repeated": len(test) - len(new[1]),
            "cold_users": new[1].join(known, on=user, how="anti")[user].n_unique(),
            "cold_items": len(found.join(known, on=item, how="anti")),
        }
        return cls(train, known, chooses, found, (user, item, time), k, about)

    def validated(self, model: Fits) -> dict[str, Tensor]:
        return self._measured(model, self.train, self.valid)

    def tested(self, model: Fits) -> dict[str, Tensor]:
        return self._measured(model, self.known, self.test)

    def _measured(self, model: Fits, known: pl.DataFrame, hidden: pl.DataFrame) -> dict[str, Tensor]:
        """Fit a model, and return the metrics of each user."""
        user, item, time = self.names
        model.fit(known, user=user, item=item, time=time)
        lists = hidden.group_by(user).agg(item).sort(user)
        found = model.recommend(lists[user], self.k)["items"]
        if len(found) != len(lists):
            raise ValueError(f"recommend must return a row for each of {len(lists)} users, got {len(found)}")
        ids = pl.concat([known[item], hidden[item]]).unique().sort()
        flat = pl.DataFrame({"id": found}).with_row_index("row").explode("id").drop_nulls("id")
        flat = flat.with_columns(place=pl.int_range(pl.len()).over("row")).filter(pl.col("place") < self.k)
        row, place = (torch.from_numpy(flat[one].cast(pl.Int64).to_numpy(writable=True)) for one in ("row", "place"))
        ranked = torch.full((len(lists), self.k), -1)
        ranked[row, place] = torch.from_numpy(codes_of(flat["id"].cast(ids.dtype), ids))
        taken = torch.from_numpy(codes_of(lists[item].explode(), ids))
        lengths = torch.from_numpy(lists[item].list.len().cast(pl.Int64).to_numpy(writable=True))
        relevant = Ragged(taken, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        return per_user(ranked, relevant)[0]


def _tuned(
    candidate: Candidate, task: _Task, trials: int, metric: str, seed: int, name: str
) -> tuple[dict[str, Any], int]:
    """Return the setting that is best on the rows that choose, and how many were tried."""
    if not candidate.space:
        return {}, 1
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler: Any = optuna.samplers.TPESampler(seed=seed)
    if number_of_settings(candidate.space) <= trials:
        grids: dict[str, Any] = {one: grid(values) for one, values in candidate.space.items()}
        sampler = optuna.samplers.GridSampler(grids, seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def value(trial: Any) -> float:
        chosen = suggest(trial, candidate.space)
        ranks.agree(f"the settings of {name!r}", **chosen)
        return float(task.validated(candidate.make(**chosen))[metric].mean())

    study.optimize(value, n_trials=trials)
    return dict(study.best_params), len(study.trials)


def _table(
    found: dict[str, dict[str, Tensor]], rows: list[dict[str, Any]], metric: str, k: int, seed: int
) -> pl.DataFrame:
    """Return a row for each model, the best first."""
    best = max(found, key=lambda name: float(found[name][metric].mean()))
    for row in rows:
        mine = found[row["model"]]
        for name in METRICS:
            low, high = _interval(mine[name].numpy(), seed)
            row |= {f"{name}@{k}": float(mine[name].mean()), f"{name}@{k} low": low, f"{name}@{k} high": high}
        p = _p_value((found[best][metric] - mine[metric]).numpy(), seed)
        row["p_value"] = p
        row["verdict"] = "best" if row["model"] == best else "level" if p >= _LEVEL else "behind"
    ordered = sorted(rows, key=lambda row: -row[f"{metric}@{k}"])
    first = ["model", *(f"{name}@{k}{end}" for name in METRICS for end in ("", " low", " high"))]
    return pl.DataFrame(ordered).select(*first, "p_value", "verdict", "trials", "parameters", "fit_seconds")


def _interval(values: Any, seed: int) -> tuple[float, float]:
    """Return the bounds of the 95 % interval of a mean, by resampling users."""
    from scipy.stats import bootstrap

    if len(values) < 2 or (values == values[0]).all():
        return float(values.mean()), float(values.mean())
    found = bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, batch=200, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(found.low), float(found.high)


def _p_value(differences: Any, seed: int) -> float:
    """Return how likely a mean difference as large is by chance, by drawing the signs of users' differences."""
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


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _require() -> None:
    try:
        import optuna  # noqa: F401
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise ImportError(f'benchmark needs optuna and SciPy: pip install "nbdist[tuning]" ({error})') from error

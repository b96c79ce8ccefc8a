"""A comparison of recommenders: equal numbers of settings, metrics with intervals, a test against the best."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from ...checks import check_choice, check_count, check_flag, check_mapping, shown
from .. import ranks
from ..io.frames import Tabular
from .base import Recommender
from .hidden import Fits, Task
from .interactions import columns_of
from .intervals import LEVEL, METRICS, table_of
from .protocols import LeaveOneOut, SplitProtocol
from .spaces import Space, grid, number_of_settings, suggest


@dataclass(frozen=True)
class Candidate:
    """A recommender of any kind, for `benchmark`.

    Args:
        make: A function that is called with a value for each parameter of `space`. It returns an object with the
            methods `fit(log, *, user, item, time)` and `recommend(users, k)` of `Recommender`.
        space: The values to try, by the name of the parameter.

    Examples:
        >>> from nbdist.recsys.recommenders import EASE, Candidate
        >>> Candidate(EASE, {"regularization": (10.0, 100.0)}).make(regularization=10.0).regularization
        10.0
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
    """The result of `benchmark`.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.recommenders import EASE, Popularity, benchmark
        >>> rows = [(u, (u + i) % 7, i) for u in range(40) for i in range(4)]
        >>> log = pl.DataFrame(rows, schema=["user", "item", "timestamp"], orient="row")
        >>> found = benchmark({"EASE": EASE(1.0), "popularity": Popularity}, log, k=2, progress=False)
        >>> found.parameters, found.about["test"]
        ({'EASE': {}, 'popularity': {}}, 40)
    """

    table: pl.DataFrame
    """A frame with a row for each model, the best first: its name; each metric with the bounds of its interval (`low`,
    `high`); `p_value` and `verdict` of a test against the best model; the number of trials, the chosen parameters, and
    the seconds of the last fit."""
    about: dict[str, Any]
    """The protocol, k, the seed, and the numbers of rows of each part, of measured and of cold users and items."""
    parameters: dict[str, dict[str, Any]]
    """The chosen parameters of each model."""
    per_user: dict[str, pl.DataFrame] = field(repr=False)
    """The metrics of each measured user, for each model."""

    def to_markdown(self) -> str:
        """Return the table and a description of the measurement, in Markdown."""
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
            f"Level: a paired test against the best has p ≥ {LEVEL:g}."
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

    The protocol divides the log into training, validation and test rows. The settings of each model are chosen by the
    validation rows. Then each model learns from training and validation rows together, and is measured by how well it
    finds the test rows. An item that a user has taken before is not recommended again, and rows that repeat such an
    item are not measured. In a function that runs on several ranks, all ranks call it with the same arguments; `EASE`,
    `IALS` and `ItemKNN` divide their work among the ranks.

    Args:
        models: The models by name: classes such as `EASE`, recommenders whose parameters are fixed, or `Candidate`s.
        log: A row for each time that a user took an item.
        user: The column of users' ids.
        item: The column of items' ids.
        time: The column of times.
        protocol: `LeaveOneOut()` or `ByTime(valid, test)`. None: `LeaveOneOut()`.
        trials: The largest number of settings to try for each model. A model with fewer settings is tried with each.
        metric: The metric by which settings and models are compared: "recall", "ndcg", "mrr" or "hit_rate".
        k: The number of items to recommend to each user.
        seed: The seed of the search, the intervals and the tests.
        progress: Print a line after each model.

    Returns:
        The comparison. Its `table` is a frame; a notebook shows it with the intervals.

    Raises:
        ImportError: optuna or SciPy is not installed.
        TypeError, ValueError: An argument is out of its range, or the log lacks a column or rows.

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
    if protocol is not None and (isinstance(protocol, (str, type)) or not hasattr(protocol, "split")):
        raise TypeError(f"`protocol` must be LeaveOneOut() or ByTime(valid, test), got {shown(protocol)}")
    _require()
    task = Task.of(columns_of(log, user, item, time), user, item, time, protocol or LeaveOneOut(), k)
    found, rows, parameters = {}, [], {}
    for name, candidate in candidates.items():
        chosen, tried = _tuned(candidate, task, trials, metric, seed, name)
        model, parameters[name] = candidate.make(**chosen), chosen
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
    table = table_of(found, rows, metric, k, seed)
    about = {**task.about, "k": k, "seed": seed}
    return Comparison(
        table,
        about,
        parameters,
        {name: pl.DataFrame({m: v.numpy() for m, v in one.items()}) for name, one in found.items()},
    )


def _tuned(
    candidate: Candidate, task: Task, trials: int, metric: str, seed: int, name: str
) -> tuple[dict[str, Any], int]:
    """Return the setting that is best on the validation rows, and the number of settings tried."""
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


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _require() -> None:
    try:
        import optuna  # noqa: F401
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise ImportError(f'benchmark needs optuna and SciPy: pip install "nbdist[tuning]" ({error})') from error

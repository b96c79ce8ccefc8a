"""`fit_recommender`: choose the model that finds hidden rows of the log best, and let it learn from all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from ...checks import check_choice, check_count, check_flag, check_mapping, check_number, shown
from .. import ranks
from ..io.frames import Tabular
from .base import Recommender
from .comparison import Candidate, Comparison, benchmark
from .ease import EASE
from .fitted import ANSWERS, FittedRecommender
from .ials import IALS
from .interactions import Interactions
from .intervals import METRICS
from .log_columns import LogColumns, kind_of, ratings_of
from .neighbors import ItemKNN
from .popularity import Popularity
from .protocols import SplitProtocol

_EASE_ITEMS = 15_000
"""The number of items above which EASE takes minutes and gigabytes, and is tried only if it is named."""
_USERS = 20_000
"""The largest number of users whose rows are used to choose the model."""
_ORDER = "order of the log (nbdist)"


def fit_recommender(
    log: Tabular,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    rating: str | None = None,
    min_rating: float | None = None,
    models: Mapping[str, Any] | Recommender | None = None,
    protocol: SplitProtocol | None = None,
    trials: int = 8,
    metric: str = "ndcg",
    k: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> FittedRecommender:
    """Make a recommender from a log: compare models on the log by `benchmark`, and let the best learn from all rows.

    The comparison uses the rows of at most 20,000 users, who are drawn at random. In a function that runs on several
    ranks, all ranks call it with the same arguments.

    Args:
        log: A row for each time that a user took an item, such as a purchase: a frame of polars or pandas, an Arrow
            table, a dict of columns, or Parquet files as for `Workflow.fit`.
        user: The column of users' ids: integers, strings or dates, none null.
        item: The column of items' ids.
        time: The column of times. None: the rows are already in the order of time.
        rating: The column of ratings, numbers or booleans. The model does not learn from rows whose rating is missing
            or below `min_rating`, but the items in these rows are not recommended to the same user. None: the model
            learns from all rows.
        min_rating: The lowest rating of an item that the user likes. None: the median of the ratings, or 1 (True) if
            they are booleans.
        models: The models to compare, by name, as for `benchmark`: classes and recommenders of this package. A single
            recommender instead is used without a comparison. None: `EASE` (up to 15,000 items), `IALS`, `ItemKNN` and
            `Popularity`.
        protocol: `LeaveOneOut()` or `ByTime(valid, test)`. None: `LeaveOneOut()`.
        trials: The largest number of settings to try for each model.
        metric: The metric by which models are compared: "recall", "ndcg", "mrr" or "hit_rate".
        k: The number of items for each user in the comparison.
        seed: The seed of the search, the intervals, the tests, and the draw of users.
        progress: Print which model is best, and by how much.

    Returns:
        The recommender. A cell that ends with it shows the comparison.

    Raises:
        ImportError: Models are to be compared, but optuna or SciPy is not installed.
        TypeError, ValueError: An argument is out of its range, or the log lacks a column or rows.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys import fit_recommender
        >>> rows = [(f"user {u}", "ABCDEFG"[(u + i) % 7], i) for u in range(40) for i in range(4)]
        >>> log = pl.DataFrame(rows, schema=["user", "item", "day"], orient="row")
        >>> recommender = fit_recommender(log, time="day", trials=2, progress=False)
        >>> recommender.recommend(["user 0", "a new one"], 1)["item"].to_list()
        ['E', 'D']
    """
    check_count(trials, least=1, name="`trials`")
    check_count(k, least=1, name="`k`")
    check_count(seed, least=0, name="`seed`")
    check_choice(metric, METRICS, name="`metric`")
    check_flag(progress, name="`progress`")
    columns = _columns(log, user, item, time, rating, min_rating)
    rows = columns.read(log)
    if not len(rows):
        raise ValueError("log must have rows, got none")
    columns = _with_least(columns, rows)
    liked = columns.liked(rows)
    numbered = Interactions.of(liked, user, item, time)
    if isinstance(models, Recommender):
        return FittedRecommender(models.unfitted().fit_to(numbered), rows, columns)
    candidates = _candidates(models, len(numbered.items))
    comparison = _compared(candidates, liked, columns, protocol, trials, metric, k, seed)
    best = comparison.table["model"][0]
    model = candidates[best].make(**comparison.parameters[best])
    assert isinstance(model, Recommender)
    found = FittedRecommender(model.unfitted().fit_to(numbered), rows, columns, comparison)
    if progress and ranks.rank() == 0:
        print(_said(comparison, columns, len(liked), len(rows), metric, k), flush=True)
    return found


def _columns(
    log: Any, user: str, item: str, time: str | None, rating: str | None, min_rating: float | None
) -> LogColumns:
    for name, value in {"user": user, "item": item, "time": time, "rating": rating}.items():
        if not isinstance(value, str) and (value is not None or name in ("user", "item")):
            raise TypeError(f"`{name}` must be the name of a column, got {shown(value)}")
    given = [name for name in (user, item, time, rating) if name is not None]
    if len(set(given)) < len(given):
        raise ValueError(f"`user`, `item`, `time` and `rating` must be different columns, got {given}")
    for name, column in {"user": user, "item": item}.items():
        if column in ANSWERS[name]:
            raise ValueError(
                f"`{name}` must have another name than the columns of answers, {', '.join(ANSWERS[name])}, got "
                f"{column!r}: rename the column"
            )
    if min_rating is not None:
        check_number(min_rating, least=-1e300, name="`min_rating`")
        if rating is None:
            raise ValueError("`rating` must name the column of ratings where `min_rating` is given, got None")
    return LogColumns(user, item, time, rating, min_rating, kind_of(log))


def _with_least(columns: LogColumns, rows: pl.DataFrame) -> LogColumns:
    """Return the columns, with the lowest rating of an item that the user likes."""
    if columns.rating is None:
        return columns
    known = rows.select(ratings_of(pl.col(columns.rating))).to_series().drop_nulls()
    if not len(known):
        raise ValueError(f"column {columns.rating!r} must have ratings, got none in {len(rows)} rows")
    least, largest = columns.min_rating, float(known.max())  # type: ignore[arg-type]
    if least is None:
        least = 1.0 if rows.schema[columns.rating] == pl.Boolean else float(known.median())  # type: ignore[arg-type]
    if least > largest:
        raise ValueError(f"`min_rating` must be at most the largest rating, {largest:g}, got {least:g}")
    return columns.with_least(least)


def _candidates(models: Mapping[str, Any] | None, items: int) -> dict[str, Candidate]:
    if models is None:
        models = {"iALS": IALS, "neighbors": ItemKNN, "popularity": Popularity}
        models = {"EASE": EASE, **models} if items <= _EASE_ITEMS else models
    if not isinstance(models, Mapping):
        raise TypeError(
            "models must be a recommender, such as EASE(100.0), or a mapping from names to recommenders, such as "
            f"{{'EASE': EASE}}, got {shown(models)}"
        )
    check_mapping(models, name="models", of="names to recommenders")
    for name, model in models.items():
        kind = model if isinstance(model, type) else type(model)
        if not issubclass(kind, Recommender):
            raise TypeError(f"model {name!r} must be a Recommender, such as EASE or EASE(100.0), got {shown(model)}")
    return {name: Candidate.of(model, name) for name, model in models.items()}


def _compared(
    candidates: Mapping[str, Candidate],
    liked: pl.DataFrame,
    columns: LogColumns,
    protocol: SplitProtocol | None,
    trials: int,
    metric: str,
    k: int,
    seed: int,
) -> Comparison:
    """Compare models on the rows of at most `_USERS` users."""
    time = columns.time
    if time is None:
        liked, time = liked.with_row_index(_ORDER), _ORDER
    users = liked[columns.user].unique().sort()
    if len(users) > _USERS:
        some = users.sample(_USERS, seed=seed, shuffle=True)
        liked = liked.filter(pl.col(columns.user).is_in(some.implode()))
    return benchmark(
        candidates,
        liked,
        user=columns.user,
        item=columns.item,
        time=time,
        protocol=protocol,
        trials=trials,
        metric=metric,
        k=k,
        seed=seed,
        progress=False,
    )


def _said(comparison: Comparison, columns: LogColumns, liked: int, rows: int, metric: str, k: int) -> str:
    """Describe which model is best, and by how much."""
    name = f"{metric}@{k}"
    first, *others = comparison.table.iter_rows(named=True)
    given = f" ({first['parameters']})" if first["parameters"] else ""
    compared = []
    for row in others:
        ahead = f"{first[name] / row[name] - 1:.0%} above" if row[name] else "above"
        level = ", level" if row["verdict"] == "level" else ""
        compared.append(f"{ahead} {row['model']} ({row[name]:.4f}{level})")
    of = "" if columns.rating is None else f" of {rows:,} ({columns.rating} ≥ {columns.min_rating:g})"
    users = comparison.about["users"]
    return (
        f"{first['model']}{given} is chosen: {name} {first[name]:.4f} on hidden rows of {users:,} users"
        f"{''.join(f', {one}' for one in compared)}. It has learned from {liked:,} rows{of}."
    )

"""Each metric gives what loops give: ties, duplicates, users and items that are unknown, 1 to 3 ranks."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Sessions
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.loader import Ragged
from nbdist.recsys.metrics import AUC, MRR, NDCG, RMSE, HitRate, LogLoss, Recall, ranking_metrics


class Row(NamedTuple):
    score: float
    label: int
    user: int
    weight: float = 1.0
    user_weight: float = 1.0


def gain(place: int) -> float:
    return 1 / math.log2(place + 2)


def of_order(labels: Sequence[int], k: int) -> list[float]:
    """Recall, NDCG, hit rate and MRR of one user's rows in an order."""
    hits = [place for place, label in enumerate(labels[:k]) if label]
    best = sum(gain(place) for place in range(min(k, sum(labels))))
    return [
        len(hits) / sum(labels),
        sum(gain(place) for place in hits) / best,
        float(bool(hits)),
        1 / (hits[0] + 1) if hits else 0.0,
    ]


def mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The mean of values by weights; None where the weights are 0."""
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def means(values: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float] | None:
    if not any(weights):
        return None
    return [mean(list(zip(each, weights, strict=True))) or 0.0 for each in zip(*values, strict=True)]


def of_users(rows: Sequence[Row], k: int) -> list[float] | None:
    """The means over users; a user counts by the mean of all orders that the scores allow."""
    found, weights = [], []
    for user in {row.user for row in rows}:
        mine = [row for row in rows if row.user == user]
        if not any(row.label for row in mine):
            continue
        orders = [sorted(order, key=lambda row: -row.score) for order in itertools.permutations(mine)]
        values = [of_order([row.label for row in order], k) for order in orders]
        found.append([statistics.fmean(each) for each in zip(*values, strict=True)])
        weights.append(mine[0].user_weight)
    return means(found, weights)


def auc(rows: Sequence[Row]) -> float | None:
    liked, others = ([row for row in rows if row.label == label] for label in (1, 0))
    return mean([((a.score > b.score) + (a.score == b.score) / 2, a.weight * b.weight) for a in liked for b in others])


def log_loss(rows: Sequence[Row]) -> float | None:
    return mean([(math.log1p(math.exp(-row.score if row.label else row.score)), row.weight) for row in rows])


def rmse(rows: Sequence[Row]) -> float | None:
    found = mean([((row.score - row.label) ** 2, row.weight) for row in rows])
    return None if found is None else math.sqrt(found)


def of_lists(
    ranked: Sequence[Sequence[int]], relevant: Sequence[Sequence[int]], weights: Sequence[float], k: int
) -> list[float] | None:
    """Recall, NDCG, hit rate and MRR; -1 is no item where it is ranked, and one that is missed where it is relevant."""
    found, counted = [], []
    for row, taken, weight in zip(ranked, relevant, weights, strict=True):
        total = len({item for item in taken if item != -1}) + sum(item == -1 for item in taken)
        labels = [int(item != -1 and item in taken and item not in row[:place]) for place, item in enumerate(row[:k])]
        if total:
            missed = total - sum(labels)
            found.append(of_order([*labels, *[0] * (k - len(labels)), *[1] * missed], k))
            counted.append(weight)
    return means(found, counted)


def measured(make: Callable[[], Any], rows: Sequence[Row], batch: int, weighted: bool = False) -> float | None:
    """A metric of this rank's rows in batches; None where it cannot be computed."""
    metric = make()
    grouped = isinstance(metric, (Recall, NDCG, HitRate, MRR))
    for start in range(0, len(rows), batch):
        scores, labels, users, weights, of_users = zip(*rows[start : start + batch], strict=True)
        columns = [torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)]
        options = {"weights": torch.tensor(of_users if grouped else weights)} if weighted else {}
        metric.update(*columns, *([torch.tensor(users)] if grouped else []), **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(metric.compute())
    except ValueError:
        return None


def all_of(rows: Sequence[Row], k: int, batch: int, weighted: bool) -> list[float | None]:
    kinds = [lambda: Recall(k), lambda: NDCG(k), lambda: HitRate(k), lambda: MRR(k), MRR, AUC]
    kinds += [lambda: LogLoss(logits=True), RMSE]
    return [measured(make, rows, batch, weighted) for make in kinds]


def expected_of(rows: Sequence[Row], k: int, weighted: bool) -> list[float | None]:
    rows = rows if weighted else [row._replace(weight=1.0, user_weight=1.0) for row in rows]
    users, whole = of_users(rows, k) or [None] * 4, of_users(rows, len(rows)) or [None] * 4
    return [*users, whole[3], auc(rows), log_loss(rows), rmse(rows)]


def lists_of(
    ranked: Sequence[Sequence[int]], relevant: Sequence[Sequence[int]], weights: Sequence[float] | None, k: int
) -> list[float] | None:
    values = torch.tensor([item for taken in relevant for item in taken], dtype=torch.int64)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, relevant))])
    places = torch.tensor([list(row) for row in ranked], dtype=torch.int64).view(-1, 4)
    try:
        given = None if weights is None else torch.tensor(weights)
        return list(ranking_metrics(places, Ragged(values, offsets), k, given).values())[:4]
    except ValueError:
        return None


def same(found: Any, expected: Any) -> bool:
    if found is None or expected is None:
        return found is expected
    return all(
        a is b is None or (None not in (a, b) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12))
        for a, b in zip(found, expected, strict=True)
    )


def few_per_user(rows: list[Row]) -> list[Row]:
    """At most five rows of a user, whose orders can all be tried."""
    counts: dict[int, int] = {}
    kept = []
    for row in rows:
        counts[row.user] = counts.get(row.user, 0) + 1
        kept += [row] if counts[row.user] <= 5 else []
    return kept


USERS = [-4, 0, 3, 2**40]
scores = st.one_of(st.sampled_from([-2.0, -1.5, 0.0, 1.0]), st.floats(-5, 5))
weights = st.sampled_from([0.0, 0.25, 1.0, 3.0, 1e6])
some_rows = (
    st.tuples(
        st.lists(st.builds(Row, scores, st.integers(0, 1), st.sampled_from(USERS), weights), min_size=1, max_size=16),
        st.tuples(*[weights] * len(USERS)),
    )
    .map(lambda drawn: [row._replace(user_weight=drawn[1][USERS.index(row.user)]) for row in drawn[0]])
    .map(few_per_user)
)
items = st.integers(-1, 6)
some_lists = st.lists(
    st.tuples(st.lists(items, min_size=4, max_size=4), st.lists(items, max_size=5), weights), min_size=1, max_size=8
)


@given(some_rows, st.integers(1, 6), st.integers(1, 8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_metrics_of_rows(rows: list[Row], k: int, batch: int, weighted: bool) -> None:
    assert same(all_of(rows, k, batch, weighted), expected_of(rows, k, weighted))


@given(some_lists, st.integers(1, 4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_metrics_of_lists(users: list[Any], k: int, weighted: bool) -> None:
    ranked, relevant, weights = zip(*users, strict=True)
    expected = of_lists(ranked, relevant, weights if weighted else [1.0] * len(users), k)
    assert same(lists_of(ranked, relevant, weights if weighted else None, k), expected)


@given(some_rows, st.data())
@settings(max_examples=20, deadline=None)
def test_one_nan_or_infinity_is_refused(rows: list[Row], data: st.DataObject) -> None:
    place, what = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(["score", "weight"]))
    wrong = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    rows[place] = rows[place]._replace(**{what: wrong, "user_weight": wrong if what == "weight" else 1.0})
    for make in (lambda: Recall(1), lambda: NDCG(1), lambda: HitRate(1), MRR, AUC, lambda: LogLoss(logits=True), RMSE):
        with pytest.raises(ValueError, match=f"not finite, the first is .* in row {place}"):
            measured(make, rows, len(rows), weighted=True)


def test_weights_that_are_refused() -> None:
    scores, labels, users = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 1]), torch.tensor([5, 5, 6])
    for metric in (AUC(), LogLoss(), RMSE()):
        for wrong, message in (
            ([1, -1, 1], "weights must be at least 0, got -1.0 in row 1"),
            ([1], "1 weights for 3 rows"),
        ):
            with pytest.raises(ValueError, match=message):
                metric.update(scores, labels, weights=torch.tensor(wrong))
        metric.update(scores, labels, weights=torch.zeros(3))
        with pytest.raises(ValueError, match=r"weights above 0|no rows on any rank"):
            metric.compute()
    recall = Recall(1)
    recall.update(scores, labels, users, weights=torch.tensor([1.0, 2.0, 1.0]))
    with pytest.raises(
        ValueError, match=r"Recall: user 5 has the weights (1.0 and 2.0|2.0 and 1.0): all rows of a user"
    ):
        recall.compute()
    with pytest.raises(ValueError, match="2 weights for 1 rows"):
        ranking_metrics(torch.tensor([[1]]), Ragged(torch.tensor([1]), torch.tensor([0, 1])), weights=torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_metrics_match_the_loops_on_ranks(sessions: Sessions, nranks: int) -> None:
    """Many cases in a call; a rank may have no rows of a case, and a user may have rows on several ranks."""
    cases: list[Any] = []
    owners = st.lists(st.integers(0, nranks - 1), min_size=16, max_size=16)

    @given(some_rows, some_lists, st.integers(1, 4), owners, st.booleans())
    @settings(max_examples=20, deadline=None, database=None)
    def collect(rows: list[Row], users: list[Any], k: int, owners: list[int], weighted: bool) -> None:
        cases.append((rows, users, k, owners, weighted))

    collect()

    def measure() -> list[Any]:
        rank, found = torch.distributed.get_rank(), []
        for rows, users, k, owners, weighted in cases:
            mine = [row for row, owner in zip(rows, owners, strict=False) if owner == rank]
            lists = [user for user, owner in zip(users, owners, strict=False) if owner == rank]
            ranked, relevant, weights = zip(*lists, strict=True) if lists else ((), (), ())
            of_ranked = lists_of(ranked, relevant, weights if weighted else None, k)
            found.append((all_of(mine, k, 3, weighted), of_ranked))
        return found

    for found in sessions[nranks].run_all(measure):
        for (rows, lists), (all_rows, users, k, _, weighted) in zip(found, cases, strict=True):
            assert same(rows, expected_of(all_rows, k, weighted))
            ranked, relevant, weights = zip(*users, strict=True)
            assert same(lists, of_lists(ranked, relevant, weights if weighted else [1.0] * len(users), k))

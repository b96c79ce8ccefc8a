"""Each metric gives what loops give: ties, duplicates, users and items that are unknown, 1 to 3 ranks."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import Sessions
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.loader import Ragged
from nbdist.recsys.metrics import AUC, MRR, NDCG, RMSE, HitRate, LogLoss, Recall, ranking_metrics

Row = tuple[float, int, int]
"""Score, label, user."""


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


def of_users(rows: Sequence[Row], k: int) -> list[float] | None:
    """The means over users; a user counts by the mean of all orders that the scores allow."""
    found = []
    for user in {user for _, _, user in rows}:
        mine = [(score, label) for score, label, one in rows if one == user]
        if not any(label for _, label in mine):
            continue
        orders = [sorted(order, key=lambda row: -row[0]) for order in itertools.permutations(mine)]
        values = [of_order([label for _, label in order], k) for order in orders]
        found.append([statistics.fmean(each) for each in zip(*values, strict=True)])
    return [statistics.fmean(each) for each in zip(*found, strict=True)] if found else None


def auc(rows: Sequence[Row]) -> float | None:
    pairs = [(a > b) + (a == b) / 2 for a, one, _ in rows for b, other, _ in rows if one and not other]
    return statistics.fmean(pairs) if pairs else None


def log_loss(rows: Sequence[Row]) -> float:
    return statistics.fmean(math.log1p(math.exp(-score if label else score)) for score, label, _ in rows)


def rmse(rows: Sequence[Row]) -> float:
    return math.sqrt(statistics.fmean((score - label) ** 2 for score, label, _ in rows))


def of_lists(ranked: Sequence[Sequence[int]], relevant: Sequence[Sequence[int]], k: int) -> list[float] | None:
    """Recall, NDCG, hit rate and MRR; -1 is no item where it is ranked, and one that is missed where it is relevant."""
    found = []
    for row, taken in zip(ranked, relevant, strict=True):
        total = len({item for item in taken if item != -1}) + sum(item == -1 for item in taken)
        labels = [int(item != -1 and item in taken and item not in row[:place]) for place, item in enumerate(row[:k])]
        if total:
            missed = total - sum(labels)
            found.append(of_order([*labels, *[0] * (k - len(labels)), *[1] * missed], k))
    return [statistics.fmean(each) for each in zip(*found, strict=True)] if found else None


def measured(make: Callable[[], Any], rows: Sequence[Row], batch: int) -> float | None:
    """A metric of this rank's rows in batches; None where it cannot be computed."""
    metric = make()
    grouped = isinstance(metric, (Recall, NDCG, HitRate, MRR))
    for start in range(0, len(rows), batch):
        scores, labels, users = zip(*rows[start : start + batch], strict=True)
        columns = torch.tensor(scores, dtype=torch.float64), torch.tensor(labels), torch.tensor(users)
        metric.update(*(columns if grouped else columns[:2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(metric.compute())
    except ValueError:
        return None


def all_of(rows: Sequence[Row], k: int, batch: int) -> list[float | None]:
    kinds = [lambda: Recall(k), lambda: NDCG(k), lambda: HitRate(k), lambda: MRR(k), MRR, AUC]
    kinds += [lambda: LogLoss(logits=True), RMSE]
    return [measured(make, rows, batch) for make in kinds]


def expected_of(rows: Sequence[Row], k: int) -> list[float | None]:
    users, whole = of_users(rows, k) or [None] * 4, of_users(rows, len(rows)) or [None] * 4
    return [*users, whole[3], auc(rows), log_loss(rows), rmse(rows)]


def lists_of(ranked: Sequence[Sequence[int]], relevant: Sequence[Sequence[int]], k: int) -> list[float] | None:
    values = torch.tensor([item for taken in relevant for item in taken], dtype=torch.int64)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, relevant))])
    places = torch.tensor([list(row) for row in ranked], dtype=torch.int64).view(-1, 4)
    try:
        return list(ranking_metrics(places, Ragged(values, offsets), k).values())[:4]
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
        counts[row[2]] = counts.get(row[2], 0) + 1
        kept += [row] if counts[row[2]] <= 5 else []
    return kept


scores = st.one_of(st.sampled_from([-2.0, -1.5, 0.0, 1.0]), st.floats(-5, 5))
some_rows = st.lists(
    st.tuples(scores, st.integers(0, 1), st.sampled_from([-4, 0, 3, 2**40])), min_size=1, max_size=16
).map(few_per_user)
items = st.integers(-1, 6)
some_lists = st.lists(
    st.tuples(st.lists(items, min_size=4, max_size=4), st.lists(items, max_size=5)), min_size=1, max_size=8
)


@given(some_rows, st.integers(1, 6), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_metrics_of_rows(rows: list[Row], k: int, batch: int) -> None:
    assert same(all_of(rows, k, batch), expected_of(rows, k))


@given(some_lists, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_metrics_of_lists(users: list[Any], k: int) -> None:
    ranked, relevant = zip(*users, strict=True)
    assert same(lists_of(ranked, relevant, k), of_lists(ranked, relevant, k))


@given(some_rows, st.data())
@settings(max_examples=40, deadline=None)
def test_one_number_that_is_none_is_refused(rows: list[Row], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(rows) - 1))
    rows[place] = (data.draw(st.sampled_from([math.nan, math.inf, -math.inf])), *rows[place][1:])
    for make in (lambda: Recall(1), lambda: NDCG(1), lambda: HitRate(1), MRR, AUC, LogLoss, RMSE):
        with pytest.raises(ValueError, match=f"not finite, the first is .* in row {place}"):
            measured(make, rows, len(rows))


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_on_ranks_with_rows_of_any_of_them(sessions: Sessions, nranks: int) -> None:
    """Many cases in a call; a rank may have no rows of a case, and a user may have rows on several ranks."""
    cases: list[Any] = []

    @given(some_rows, some_lists, st.integers(1, 4), st.lists(st.integers(0, nranks - 1), min_size=16, max_size=16))
    @settings(max_examples=40, deadline=None, database=None)
    def collect(rows: list[Row], users: list[Any], k: int, owners: list[int]) -> None:
        cases.append((rows, users, k, owners))

    collect()

    def measure() -> list[Any]:
        rank, found = torch.distributed.get_rank(), []
        for rows, users, k, owners in cases:
            mine = [row for row, owner in zip(rows, owners, strict=False) if owner == rank]
            lists = [user for user, owner in zip(users, owners, strict=False) if owner == rank]
            ranked, relevant = zip(*lists, strict=True) if lists else ((), ())
            found.append((all_of(mine, k, 3), lists_of(ranked, relevant, k)))
        return found

    for found in sessions[nranks].run_all(measure):
        for (rows, lists), (all_rows, users, k, _) in zip(found, cases, strict=True):
            assert same(rows, expected_of(all_rows, k))
            assert same(lists, of_lists(*zip(*users, strict=True), k))

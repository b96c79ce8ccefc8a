"""Normalized entropy, calibration, GAUC, MAP, coverage and novelty compared with loops of NumPy; bad rows are named."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from nbdist import Session
from nbdist.recsys.metrics import GAUC, MAP, Calibration, NormalizedEntropy, catalog_metrics

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=14
)


def columns(rows: list[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
    return list(np.array(rows).T)


@given(ROWS, st.booleans(), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_probabilities_match_a_plain_formula(rows: list[tuple[int, ...]], logits: bool, batch: int) -> None:
    _, scores, labels, weights = columns(rows)
    probabilities = 1 / (1 + np.exp(-scores.astype(float)))
    preds = torch.from_numpy(scores.astype(float) if logits else probabilities)
    entropy, calibration = NormalizedEntropy(logits), Calibration(logits)
    parts = (preds, torch.from_numpy(labels), torch.from_numpy(weights))
    for some in zip(*(part.split(batch) for part in parts), strict=True):
        entropy.update(*some)
        calibration.update(*some)
    if weights.sum() == 0:
        with pytest.raises(ValueError, match="no rows on any rank"):
            calibration.compute()
        return
    share = np.average(labels, weights=weights)
    if share == 0:
        with pytest.raises(ValueError, match="at least one row must have the label 1"):
            calibration.compute()
    else:
        assert float(calibration.compute()) == pytest.approx(np.average(probabilities, weights=weights) / share)
    if share in (0, 1):
        with pytest.raises(ValueError, match=r"it needs both labels|labels of 0 and of 1, got only"):
            entropy.compute()
        return
    loss = log_loss(labels, probabilities, sample_weight=weights, labels=[0, 1])
    base = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert float(entropy.compute()) == pytest.approx(loss / base)
    entropy.reset()
    with pytest.raises(ValueError, match="no rows on any rank"):
        entropy.compute()


@given(ROWS)
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore:GAUC")
def test_gauc_is_the_mean_of_users(rows: list[tuple[int, ...]]) -> None:
    users, scores, labels, _ = columns(rows)
    gauc = GAUC()
    gauc.update(torch.from_numpy(scores.astype(float)), torch.from_numpy(labels), torch.from_numpy(users))
    some = {user: users == user for user in set(users) if len(set(labels[users == user])) == 2}
    if not some:
        with pytest.raises(ValueError, match="GAUC: no"):
            gauc.compute()
        return
    found = float(gauc.compute())
    aucs = [roc_auc_score(labels[mine], scores[mine]) for mine in some.values()]
    assert found == pytest.approx(np.average(aucs, weights=[mine.sum() for mine in some.values()]))
    positive = sum(all(labels[users == user]) for user in set(users))
    assert (gauc.users, gauc.users_without_negatives) == (len(some), positive)


def precision(labels: tuple[int, ...], k: int) -> float:
    """The average precision of rows in this order."""
    hits, total = 0, 0.0
    for place, label in enumerate(labels[:k], 1):
        hits += label
        total += label * hits / place
    return total / min(k, sum(labels))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=6), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_map_is_its_expectation_over_orders_of_ties(rows: list[tuple[int, int]], k: int) -> None:
    if not any(label for _, label in rows):
        rows = [*rows, (1, 1)]
    orders = [order for order in itertools.permutations(rows) if list(order) == sorted(order, key=lambda one: -one[0])]
    expected = np.mean([precision(tuple(label for _, label in order), k) for order in orders])
    scores, labels = columns(rows)
    users = np.concatenate([np.zeros(len(rows)), np.ones(2)]).astype(int)  # and a user who is served perfectly
    found = MAP(k)
    found.update(
        torch.from_numpy(np.concatenate([scores, [1, 0]]).astype(float)),
        torch.from_numpy(np.concatenate([labels, [1, 0]])),
        torch.from_numpy(users),
    )
    assert float(found.compute()) == pytest.approx((expected + 1) / 2)


def test_map_without_ties_is_that_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.permutation(40).astype(float), draw.integers(0, 2, 40)
    found = MAP()
    found.update(torch.from_numpy(scores), torch.from_numpy(labels), torch.zeros(40, dtype=torch.int64))
    assert float(found.compute()) == pytest.approx(average_precision_score(labels, scores))


@given(st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_catalogs_are_those_of_loops(lists: list[list[int]], k: int) -> None:
    counts = [5, 0, 2, 2, 1, 10]
    listed = [item for one in lists for item in one[:k] if item >= 0]
    ranked = torch.tensor(lists)
    if not listed:
        with pytest.raises(ValueError, match="no list has an item"):
            catalog_metrics(ranked, torch.tensor(counts), k)
        return
    found = catalog_metrics(ranked, torch.tensor(counts), k)
    assert found[f"coverage@{k}"] == pytest.approx(len(set(listed)) / 6)
    assert found[f"novelty@{k}"] == pytest.approx(np.mean([-np.log2(max(1, counts[item]) / 20) for item in listed]))


def test_ranks_have_the_number_of_all_rows(session: Session) -> None:
    draw = torch.Generator().manual_seed(1)
    scores, labels = torch.rand(60, generator=draw), torch.arange(60) % 3 == 0
    users, ranked = torch.arange(60) % 7, torch.randint(0, 30, (10, 4), generator=draw)

    def fn(rank: int | None = None) -> list[Any]:
        rank = torch.distributed.get_rank() if rank is None else rank
        rows, lists = ((slice(None), slice(None)), (slice(0, 10), slice(0, 2)), (slice(10, None), slice(2, None)))[
            rank + 1
        ]
        metrics: list[Any] = [NormalizedEntropy(), Calibration(), GAUC(), MAP(5)]
        for metric in metrics:
            metric.update(scores[rows], labels[rows], *([users[rows]] if isinstance(metric, (GAUC, MAP)) else []))
        return [
            *(float(metric.compute()) for metric in metrics),
            *catalog_metrics(ranked[lists], torch.arange(30)).values(),
        ]

    expected = fn(-1)
    for found in session.run_all(fn):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            lambda: NormalizedEntropy().update(torch.tensor([1.5]), torch.tensor([1])),
            "predictions are not probabilities",
        ),
        (lambda: Calibration().update(torch.tensor([0.5]), torch.tensor([2])), "targets must be labels, 0 or 1"),
        (lambda: Calibration().update(torch.ones(2), torch.tensor([1])), "2 predictions for 1 targets"),
        (lambda: GAUC().update(torch.ones(1), torch.ones(1), torch.ones(1)), "users must be integers"),
        (lambda: MAP(0), "`k` must be an integer, at least 1, got 0"),
        (lambda: catalog_metrics([[0, 1]], {0: 2}), "ranked items and counts must be tensors, got list and dict"),
        (lambda: catalog_metrics(torch.ones(1, 2), torch.ones(2)), "ranked items must be integers of shape"),
        (lambda: catalog_metrics(torch.tensor([[5]]), torch.ones(2)), "ranked items must be -1 to 1, got 5 to 5"),
        (lambda: catalog_metrics(torch.tensor([[0]]), torch.zeros(2)), "counts must be finite numbers of at least 0"),
        (lambda: catalog_metrics(torch.tensor([[0]]), torch.ones(2), 2), "`k` must be 1 to 1"),
    ],
)
def test_bad_rows_are_named(action: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        action()

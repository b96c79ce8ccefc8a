"""Metrics of ranked items: what a naive reference says, over all ranks, also where some of them have no rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import Session
from nbdist.recsys.loader import MemoryLoader, Ragged
from nbdist.recsys.metrics import AUC, MRR, NDCG, HitRate, Recall, ranking_metrics
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import evaluate, fit


def ragged(lists: list[list[int]]) -> Ragged:
    lengths = torch.tensor([0, *map(len, lists)])
    return Ragged(torch.tensor([value for one in lists for value in one], dtype=torch.int64), lengths.cumsum(0))


def naive(ranked: list[list[int]], relevant: list[list[int]], k: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in ("recall", "ndcg", "hit_rate", "mrr")}
    for row, taken in zip(ranked, relevant, strict=True):
        if not taken:
            continue
        hits = [place for place, item in enumerate(row[:k]) if item in taken]
        best = sum(1 / math.log2(place + 2) for place in range(min(k, len(taken))))
        found["recall"].append(len(hits) / len(taken))
        found["ndcg"].append(sum(1 / math.log2(place + 2) for place in hits) / best)
        found["hit_rate"].append(float(bool(hits)))
        found["mrr"].append(1 / (hits[0] + 1) if hits else 0.0)
    return {f"{name}@{k}": sum(values) / len(values) for name, values in found.items()}


users = st.lists(
    st.tuples(st.permutations(range(8)), st.lists(st.integers(0, 11), unique=True, max_size=6)), min_size=1, max_size=12
).filter(lambda users: any(taken for _, taken in users))


@given(users, st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_as_a_naive_reference_has_it(users: list[Any], k: int) -> None:
    ranked, relevant = [list(row) for row, _ in users], [taken for _, taken in users]
    found = ranking_metrics(torch.tensor(ranked), ragged(relevant), k)
    assert found == pytest.approx(naive(ranked, relevant, k), abs=1e-6)


def test_places_without_an_item_are_no_hits() -> None:
    found = ranking_metrics(torch.tensor([[3, -1, -1]]), ragged([[5]]))
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize(
    ("ranked", "relevant", "k", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), [[1]], None, "2 users with ranked items, and 1 with relevant"),
        (torch.zeros(1, 3, dtype=torch.int64), [[1]], 4, "k=4: 1 to 3"),
        (torch.zeros(1, 3, dtype=torch.int64), [[]], None, "no user took anything"),
    ],
)
def test_what_makes_no_sense(ranked: torch.Tensor, relevant: Any, k: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranking_metrics(ranked, ragged(relevant), k)


@pytest.mark.parametrize("shift", [0.0, -5.0, -1e6])
def test_scores_below_zero_are_scores(shift: float) -> None:
    scores, taken, users = torch.tensor([2.0, 1.0, 0.0, 1.0, 2.0, 0.0]) + shift, [0, 1, 0, 1, 0, 0], [4, 4, 4, 9, 9, 9]
    for metric, expected in ((MRR(), 0.5), (HitRate(2), 1.0), (Recall(1), 0.0), (NDCG(3), 1 / math.log2(3))):
        for rows in (slice(0, 2), slice(2, 6)):  # asked in between, too
            metric.update(scores[rows], torch.tensor(taken)[rows], torch.tensor(users)[rows])
            found = float(metric.compute())
        assert found == pytest.approx(expected), metric
    with pytest.raises(ValueError, match="MRR: no rows on any rank"):
        MRR().compute()


@pytest.mark.slow
def test_all_ranks_have_the_numbers_of_all_users(session: Session) -> None:
    draw = torch.Generator().manual_seed(3)
    ranked = torch.stack([torch.randperm(20, generator=draw)[:5] for _ in range(30)])
    relevant = [torch.randperm(20, generator=draw)[: n % 4].tolist() for n in range(30)]
    expected = ranking_metrics(ranked, ragged(relevant), 4)

    def share(cut: int) -> dict[str, float]:
        mine = slice(0, cut) if torch.distributed.get_rank() == 0 else slice(cut, 30)
        return ranking_metrics(ranked[mine], ragged(relevant[mine]), 4)

    def in_steps() -> list[float]:
        """Rows of all users on both ranks, three batches here and none there."""
        metrics = [Recall(2), NDCG(2), HitRate(2), MRR()]
        if torch.distributed.get_rank() == 1:
            for start in (0, 4, 8):
                rows = slice(start, start + 4)
                scores, taken = torch.arange(12.0)[rows], torch.tensor([0, 1, 0, 0] * 3)[rows]
                for metric in metrics:
                    metric.update(scores, taken, torch.tensor([0, 1, 2, 0] * 3)[rows])
        return [float(metric.compute()) for metric in metrics]

    for cut in (10, 29, 0):
        assert session.run_all(share, cut) == [pytest.approx(expected), pytest.approx(expected)]
    first, second = session.run_all(in_steps)
    assert first == second == pytest.approx([2 / 9, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.slow
def test_in_a_training_run(session: Session) -> None:
    """`predict` may return whose rows they are; metrics of rows do without."""
    users, taken = torch.arange(12) // 3, torch.tensor([1, 0, 0] * 4)
    rows = {"user": users, "x": torch.tensor([0.9, 0.1, 0.2, 0.1, 0.2, 0.9] * 2)[:, None], "taken": taken}

    def predict(model: Any, batch: Any) -> Any:
        return model(batch["x"]).squeeze(1), batch["taken"], batch["user"]

    def run() -> Any:
        linear = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(linear.weight)
        model = replicate(linear, lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        loader, metrics = MemoryLoader(rows, 5), {"auc": AUC(), "ndcg": NDCG(3), "mrr": MRR(), "recall": Recall(1)}
        history = fit(model, predict, loader, loader, steps=1, metrics=metrics, progress=False)
        padded = evaluate(model, predict, MemoryLoader(rows, 5, remainder="pad"), metrics)
        with pytest.raises(TypeError, match="mrr: MRR ranks the rows of each user: predict has to return who they are"):
            evaluate(model, lambda *args: predict(*args)[:2], loader, {"mrr": MRR()})
        return history[-1].metrics, padded

    (metrics, padded), others = session.run_all(run)
    assert (metrics, padded) == others and metrics == padded
    assert metrics["mrr"] == pytest.approx((1 + 1 / 3) / 2) and metrics["recall"] == 0.5

"""Metrics of ranked items: what a naive reference says, over all ranks, also where some of them have no rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MeanSquaredError

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
def test_ranking_metrics_match_a_naive_reference(users: list[Any], k: int) -> None:
    ranked, relevant = [list(row) for row, _ in users], [taken for _, taken in users]
    found = ranking_metrics(torch.tensor(ranked), ragged(relevant), k)
    expected = naive(ranked, relevant, k)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert (found["users"], found["users_without_items"]) == (
        sum(map(bool, relevant)),
        sum(not taken for taken in relevant),
    )


def test_places_without_an_item_are_no_hits() -> None:
    for relevant in ([[5]], [[-1]], [[5, -1]]):
        found = ranking_metrics(torch.tensor([[3, -1, -1]]), ragged(relevant))
        assert set(list(found.values())[:4]) == {0.0}


def test_an_item_counts_once_and_one_that_is_not_known_is_missed() -> None:
    ranked = torch.tensor([[4, 8], [8, 8], [1, 2], [1, 2]])
    found = ranking_metrics(ranked, ragged([[8, 9, 9], [8, 8], [1, -1, -1], []]))
    assert found["recall@2"] == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert found["mrr@2"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert (found["users"], found["users_without_items"], found["unknown_items"]) == (3, 1, 2)


def test_many_users_take_a_few_operations() -> None:
    users, draw = 20_000, torch.Generator().manual_seed(0)
    ranked = torch.randint(500, (users, 10), generator=draw)
    taken = torch.randint(500, (users,), generator=draw)
    with torch.profiler.profile() as profile:
        found = ranking_metrics(ranked, Ragged(taken, torch.arange(users + 1)))
    assert found["hit_rate@10"] == pytest.approx(float((ranked == taken[:, None]).any(1).double().mean()))
    assert len(profile.events()) < 1000, "not one after the other"


def test_equal_scores_count_by_their_expectation() -> None:
    for kind in (Recall, HitRate):
        for place in range(5):
            metric, taken = kind(1), torch.zeros(5)
            taken[place] = 1
            metric.update(torch.full((5,), 0.5), taken, torch.zeros(5, dtype=torch.int64))
            assert float(metric.compute()) == pytest.approx(0.2)


def test_users_without_positives_are_left_out_with_a_warning() -> None:
    both = ranking_metrics(torch.tensor([[4], [6]]), ragged([[4], []]))
    for metric, name in ((HitRate(1), "hit_rate@1"), (Recall(1), "recall@1"), (NDCG(1), "ndcg@1"), (MRR(1), "mrr@1")):
        metric.update(torch.tensor([0.9, 0.1, 0.8]), torch.tensor([1, 0, 0]), torch.tensor([0, 0, 1]))
        with pytest.warns(UserWarning, match="1 of 2 users have no positive row and are left out"):
            assert float(metric.compute()) == both[name] == 1.0
        assert (metric.users, metric.users_without_positives) == (1, 1)
    alone = HitRate(1)
    alone.update(torch.tensor([0.9]), torch.tensor([0]), torch.tensor([3]))
    with pytest.raises(ValueError, match="HitRate: none of 1 users has a positive row"):
        alone.compute()


@pytest.mark.parametrize(
    ("scores", "taken", "users", "message"),
    [
        ([0.1, math.nan], [0, 1], [3, 7], r"1 of 2 predictions are not finite, the first is nan in row 1 \(user 7\)"),
        ([0.1, -math.inf], [0, 1], [3, 7], "the first is -inf in row 1"),
        ([0.1, 0.2], [0, 2], [3, 7], "must be labels, 0 or 1, or booleans, got 2 in row 1"),
        ([0.1, 0.2], [0, 1], [3.0, 7.0], "users must be integers, got torch.float32"),
        ([0.1, 0.2], [0, 1], [3], "user of each of 2 rows, got 1 users"),
        ([[0.1, 0.2], [0.1, 0.2]], [[0, 1], [1, 0]], [3, 7], r"must have one column, got the shape \(2, 2\)"),
    ],
)
def test_rows_that_are_refused(scores: Any, taken: Any, users: Any, message: str) -> None:
    for metric in (Recall(1), NDCG(1), HitRate(1), MRR()):
        with pytest.raises(ValueError, match=message):
            metric.update(torch.tensor(scores), torch.tensor(taken), torch.tensor(users))


@pytest.mark.parametrize(
    ("ranked", "relevant", "k", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), [[1]], None, "a list for each of 2 users, got 1 lists"),
        (torch.zeros(1, 3, dtype=torch.int64), [[1]], 4, "`k` must be 1 to 3, .* got 4"),
        (torch.zeros(1, 3, dtype=torch.int64), [[]], None, "an item for at least one user, got none"),
        (torch.full((1, 3), math.nan), [[1]], None, "items must be integers"),
        (torch.zeros(1, 3, dtype=torch.bool), [[1]], None, "items must be integers.* got torch.bool"),
    ],
)
def test_invalid_arguments_of_ranking_metrics_are_refused(
    ranked: torch.Tensor, relevant: Any, k: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ranking_metrics(ranked, ragged(relevant), k)


def test_wrong_types_and_invalid_k_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a tensor and relevant ones a Ragged, .*, got list and list"):
        ranking_metrics([[1]], [[1]])  # type: ignore[arg-type]
    for make in (Recall, NDCG, HitRate, MRR):
        with pytest.raises(ValueError, match=r"`k` must be an integer, at least 1, got 2\.5"):
            make(2.5)


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
    # Of three users one took something.
    assert first == second == pytest.approx([2 / 3, 1.0, 1.0, 1.0])


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
        with pytest.raises(
            TypeError, match="mrr: MRR ranks the rows of each user, so `predict` must also return the users"
        ):
            evaluate(model, lambda *args: predict(*args)[:2], loader, {"mrr": MRR()})
        weighted = torch.where(users == 0, 4.0, 1.0)

        def with_weights(model: Any, batch: Any) -> Any:
            return *predict(model, batch), weighted.gather(0, batch["user"] * 3)

        found = evaluate(model, with_weights, MemoryLoader(rows, 5, remainder="pad"), metrics)
        assert found["recall"] == pytest.approx(5 / 7) and found["auc"] != padded["auc"]
        without_users = lambda *args: (*with_weights(*args)[:2], None, with_weights(*args)[3])  # noqa: E731
        assert evaluate(model, without_users, loader, {"auc": AUC()})["auc"] == pytest.approx(found["auc"])
        with pytest.raises(TypeError, match="mse: MeanSquaredError takes no weights, but `predict` returns some"):
            evaluate(model, without_users, loader, {"mse": MeanSquaredError()})
        return history[-1].metrics, padded

    (metrics, padded), others = session.run_all(run)
    assert (metrics, padded) == others and metrics == padded
    assert metrics["mrr"] == pytest.approx((1 + 1 / 3) / 2) and metrics["recall"] == 0.5

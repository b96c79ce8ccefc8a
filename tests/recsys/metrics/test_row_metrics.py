"""Metrics: what a naive reference says, over all ranks and however the rows are divided."""

from __future__ import annotations

import math
import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from nbdist import Session
from nbdist.recsys.metrics import AUC, RMSE, LogLoss, Throughput
from nbdist.recsys.metrics import rows as row_metrics


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (with ties, also outside 0 .. 1) and labels of both kinds."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    labels[:2] = 0, 1
    return torch.from_numpy((rng.normal(size=count) + labels).round(1)), torch.from_numpy(labels)


@given(st.integers(2, 300), st.integers(0, 1000), st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_row_metrics_match_a_naive_reference(count: int, seed: int, batch: int) -> None:
    scores, labels = rows(count, seed)
    auc, loss, from_logits, rmse = AUC(), LogLoss(), LogLoss(logits=True), RMSE()
    for one, label in zip(scores.split(batch), labels.split(batch), strict=True):
        auc.update(one, label)
        loss.update(one.sigmoid(), label.bool()[:, None])
        from_logits.update(one, label.float())
        rmse.update(one[:, None].float(), label)
    assert float(auc.compute()) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    expected = log_loss(labels, scores.sigmoid())
    assert float(loss.compute()) == pytest.approx(expected) == float(from_logits.compute())
    assert float(rmse.compute()) == pytest.approx(math.sqrt(((scores - labels) ** 2).mean()), rel=1e-5)


def test_ranks_have_the_number_of_all_rows(session: Session) -> None:
    scores, labels = rows(1000, 2)

    def fn() -> list[float]:
        rank = torch.distributed.get_rank()
        share = slice(0, 300) if rank == 0 else slice(300, 1000)
        auc, loss, rmse = AUC(), LogLoss(logits=True), RMSE()
        for metric in (auc, loss, rmse):
            metric.update(scores[share], labels[share])
        clock = iter([0.0, 5.0, 6.0 + rank])  # at its start, at its reset, at its update
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
            speed = Throughput()
            speed.reset()
            speed.update(len(scores[share]))
        return [float(metric.compute()) for metric in (auc, loss, rmse, speed)]

    first, second = session.run_all(fn)
    assert first == second
    expected = [roc_auc_score(labels, scores), log_loss(labels, scores.sigmoid())]
    assert first[:2] == pytest.approx(expected, abs=1e-6)
    assert first[2] == pytest.approx(math.sqrt(((scores - labels) ** 2).mean()))
    assert first[3] == 1000 / 2, "all rows by the time of the slowest rank"


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_without_rows_takes_part(session: Session, silent: int) -> None:
    scores, labels = rows(100, 3)

    def fn() -> list[float]:
        warnings.simplefilter("ignore")  # torchmetrics warns of the rank without rows
        auc, loss = AUC(), LogLoss(logits=True)
        if torch.distributed.get_rank() != silent:
            auc.update(scores, labels)
            loss.update(scores, labels)
        return [float(auc.compute()), float(loss.compute())]

    for values in session.run_all(fn):
        assert values == pytest.approx([roc_auc_score(labels, scores), log_loss(labels, scores.sigmoid())])


@pytest.mark.long("larger tables")
def test_millions_of_rows_are_summed_exactly_enough() -> None:
    rmse, loss = RMSE(), LogLoss()
    for _ in range(20):
        rmse.update(torch.full((1_000_000,), 1.5), torch.zeros(1_000_000))
        loss.update(torch.full((1_000_000,), 0.5), torch.zeros(1_000_000))
    assert float(rmse.compute()) == pytest.approx(1.5, rel=1e-9)
    assert float(loss.compute()) == pytest.approx(math.log(2), rel=1e-7)


def test_reset_clears_a_metric() -> None:
    speed = Throughput()
    speed.update(10)
    speed.reset()
    time.sleep(0.05)
    speed.update(10)
    assert float(speed.compute()) <= 200
    auc = AUC()
    auc.update(torch.tensor([0.1, 0.9]), torch.tensor([1, 0]))
    auc.reset()
    auc.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert float(auc.compute()) == 1


@pytest.mark.parametrize("metric", [AUC(), LogLoss(logits=True), RMSE()])
def test_invalid_predictions_and_targets_are_refused(metric: Any) -> None:
    one = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="2 predictions for 3 targets"):
        metric.update(one, torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match="1 of 2 predictions are not finite"):
        metric.update(torch.tensor([float("nan"), 1]), torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"targets must have one column, got the shape \(2, 2\)"):
        metric.update(one, torch.tensor([[1, 0], [1, 0]]))
    with pytest.raises(ValueError, match="targets"):
        metric.update(one, torch.tensor([1, float("nan")]))
    with pytest.raises(ValueError, match=r"no rows"):
        metric.compute()


def test_labels_and_probabilities() -> None:
    one = torch.tensor([0.5, 2.0])
    for metric in (AUC(), LogLoss()):
        with pytest.raises(ValueError, match="0 or 1"):
            metric.update(one / 2, torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="probabilities"):
        LogLoss().update(one, torch.tensor([1, 0]))
    auc = AUC()
    auc.update(one, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="2 rows with 2 labels of 1"):
        auc.compute()

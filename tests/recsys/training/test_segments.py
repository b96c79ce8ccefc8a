"""Metrics by segments: of the rows of each alone, with intervals that follow from its rows, on all ranks."""

from __future__ import annotations

import math
from typing import Any

import polars as pl
import pytest
import torch
from conftest import Sessions
from torch import nn

from nbdist.recsys import fit_recommender
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.metrics import AUC, NDCG, RMSE
from nbdist.recsys.recommenders import ItemKNN
from nbdist.recsys.training import evaluate, evaluate_by

pytestmark = pytest.mark.slow
WARM = "import nbdist.recsys.training"


def rows() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(301, generator=draw)
    liked = scores + torch.randn(301, generator=draw) > 0
    part = torch.arange(301) % 3
    return {"x": scores, "liked": liked | (part == 2), "user": torch.arange(301) // 5, "part": part}


def predict(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]), batch["liked"], batch["user"]


def test_a_segment_has_the_metrics_of_its_rows_alone(sessions: Sessions) -> None:
    metrics = {"auc": AUC(), "ndcg": NDCG(3)}

    def both() -> tuple[pl.DataFrame, list[dict[str, float]]]:
        loader = MemoryLoader(rows(), 32, remainder="pad")
        found = evaluate_by(nn.Identity(), predict, loader, metrics, "part", resamples=40)
        alone = []
        for part in (0, 1):
            some = {name: column[rows()["part"] == part] for name, column in rows().items()}
            alone.append(evaluate(nn.Identity(), predict, MemoryLoader(some, 32), metrics))
        return found, alone

    found, alone = sessions[2].run(both)
    assert found.columns == ["part", "rows", "auc", "auc low", "auc high", "ndcg", "ndcg low", "ndcg high"]
    assert found["part"].to_list() == [0, 1, 2] and found["rows"].to_list() == [101, 100, 100]
    for row, expected in zip(found.iter_rows(named=True), alone, strict=False):
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=1e-9)
            assert row[f"{name} low"] < value < row[f"{name} high"]
    assert all(math.isnan(found[name][2]) for name in ("auc", "auc low", "auc high")), "one label only"
    assert [found[name][2] for name in ("ndcg", "ndcg low", "ndcg high")] == pytest.approx([1.0] * 3)


def test_intervals_are_those_of_the_mean(sessions: Sessions) -> None:
    """The mean squared error of normal errors, whose standard error is known."""

    def errors() -> pl.DataFrame:
        draw = torch.Generator().manual_seed(1)
        table = {"x": torch.randn(400, generator=draw), "y": torch.zeros(400), "one": torch.ones(400)}
        loader = MemoryLoader(table, 100)
        return evaluate_by(nn.Identity(), lambda m, b: (m(b["x"]), b["y"]), loader, {"rmse": RMSE()}, "one")

    ((_, count, value, low, high),) = sessions[1].run(errors).rows()
    assert count == 400 and value == pytest.approx(1, abs=0.1)
    width = 2 * 1.96 / math.sqrt(2 * 400)  # of a standard deviation
    assert high - low == pytest.approx(width, rel=0.25)


def test_what_is_not_there_is_refused(sessions: Sessions) -> None:
    def run(by: str = "part", **options: Any) -> None:
        evaluate_by(nn.Identity(), predict, MemoryLoader(rows(), 32), {"auc": AUC()}, by, **options)

    with pytest.raises(ValueError, match="`by`: the batch has no column 'country'"):
        sessions[1].run(run, "country")
    with pytest.raises(ValueError, match="`resamples` must be at least 2, got 1"):
        sessions[1].run(run, resamples=1)
    with pytest.raises(ValueError, match="`by` must have another name than the columns of the answer, rows, auc, "):
        sessions[1].run(run, "rows")


def test_rows_without_a_segment_are_one_segment(sessions: Sessions) -> None:
    def errors() -> pl.DataFrame:
        table = {"x": torch.arange(5.0), "y": torch.zeros(5), "s": torch.tensor([math.nan, 1.0, math.nan, -1.0, 1.0])}
        loader = MemoryLoader(table, 2)
        options: dict[str, Any] = {"resamples": 2}
        return evaluate_by(nn.Identity(), lambda m, b: (m(b["x"]), b["y"]), loader, {"rmse": RMSE()}, "s", **options)

    found = sessions[2].run(errors)
    assert found["s"].to_list()[:2] == [-1.0, 1.0] and math.isnan(found["s"][2])
    assert found["rows"].to_list() == [1, 2, 2]
    assert found["rmse"].to_list() == pytest.approx([3.0, math.sqrt((1 + 16) / 2), math.sqrt(2)])


def test_segments_of_users_of_a_recommender() -> None:
    log = {"user": [1, 1, 2, 2, 3, 4, 5, 6], "item": ["a", "b", "a", "b", "a", "b", "a", "b"]}
    recommender = fit_recommender(log, models=ItemKNN())
    later = pl.DataFrame(
        {"user": [3, 4, 5, 6, 9], "item": ["b", "c", "b", "a", "a"], "country": ["fr", "fr", "de", "de", None]}
    )
    found = recommender.evaluate(later, 1, by="country")
    assert found.select("country", "count", "recall@1").rows() == [(None, 1, 1.0), ("de", 2, 1.0), ("fr", 2, 0.5)]
    assert found.filter(country="fr").select("recall@1 low", "recall@1 high").row(0) == (0.0, 1.0)
    whole = recommender.evaluate(later, 1).filter(users="all")["recall@1"][0]
    assert (found["recall@1"] * found["count"]).sum() / 5 == pytest.approx(whole)
    twice = pl.concat([later, later.head(1).with_columns(item=pl.lit("c"), country=pl.lit("de"))])
    with pytest.raises(ValueError, match="column 'country' must have one value for each user, got 'fr' and others"):
        recommender.evaluate(twice, 1, by="country")
    with pytest.raises(ValueError, match="`by` must be another column"):
        recommender.evaluate(later, 1, by="user")
    with pytest.raises(ValueError, match="not have the name 'count'"):
        recommender.evaluate(later.rename({"country": "count"}), 1, by="count")
    with pytest.raises(ValueError, match="must have a column 'city'"):
        recommender.evaluate(later, 1, by="city")

"""An export for Triton recommends as the recommender does: with the server's code here, and from a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from nbdist.recsys import fit_recommender
from nbdist.recsys.recommenders import EASE, IALS, FittedRecommender, ItemKNN, Popularity
from nbdist.recsys.triton import NULL, Ensemble, serve, serving
from nbdist.recsys.triton.served.recommend import Recommendations

pytestmark = pytest.mark.slow
MODELS = (EASE(5.0), ItemKNN(neighbors=4), IALS(dim=4), Popularity(half_life=20))
OPTIONS: dict[str, Any] = {"time": "time", "rating": "rating", "min_rating": 3}


def log_of(kind: Any) -> pl.DataFrame:
    draw = torch.Generator().manual_seed(0)
    user, item, rating = (torch.randint(most, (200,), generator=draw).numpy() for most in (20, 12, 6))
    rows = pl.DataFrame({"user": user, "item": item, "time": np.arange(200), "rating": rating})
    return rows.with_columns(
        pl.format("é{}", one).alias(one) if kind is str else pl.col(one) for one in ("user", "item")
    )


def asked(recommender: FittedRecommender, k: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows of a request, known users and others, some with a history; and answers: ids and scores."""
    users, items = recommender.known_users, recommender.known_items
    new = ["nobody", "né"] if users.dtype == pl.String else [998, 999]
    users = pl.concat([users, pl.Series(new, dtype=users.dtype)])
    histories = [items[:row].to_list() if row in (1, 3, 6, len(users) - 1) else [] for row in range(len(users))]
    rows = pl.DataFrame({"user": users, "history": histories}, schema_overrides={"history": pl.List(items.dtype)})
    more = rows.explode("history").drop_nulls().rename({"history": "item"})
    return rows, recommender.recommend(users, k, history=more)


def check(rows: pl.DataFrame, expected: pl.DataFrame, items: np.ndarray, scores: np.ndarray, k: int) -> None:
    assert items.shape == scores.shape == (len(rows), k) and scores.dtype == np.float32
    for row, user in enumerate(rows["user"]):
        wanted = expected.filter(user=user)
        count = len(wanted)
        np.testing.assert_allclose(scores[row, :count], wanted["score"], rtol=1e-4, atol=1e-5)
        assert np.isneginf(scores[row, count:]).all()
        found = [one.decode() if isinstance(one, bytes) else one for one in items[row].tolist()]
        assert found[count:] == [NULL if isinstance(found[0], int) else "\x1a"] * (k - count)
        gaps = np.diff(wanted["score"]) < -1e-4  # of equal scores, any may come first
        for place in range(count):
            if (place == 0 or gaps[place - 1]) and (place + 1 == count or gaps[place]):
                assert found[place] == wanted["item"][place] or (place + 1 == count == k), (user, place)


@pytest.mark.parametrize("kind", [int, str])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("k", [3, 12])
def test_the_servers_code_recommends_as_the_recommender(tmp_path: Path, model: Any, kind: Any, k: int) -> None:
    recommender = fit_recommender(log_of(kind), models=model, **OPTIONS)
    exported = recommender.export(tmp_path / "repository", k=k)
    rows, expected = asked(recommender, k)
    assert {"Popularity", type(model).__name__} == set(expected["by"])
    run = Recommendations(tmp_path / "repository" / "recommend" / "1")
    items, scores = run(*(exported.request(rows)[name] for name in run.names))
    check(rows, expected, items, scores, k)


@pytest.mark.long("Triton: a server")
@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
def test_a_server_recommends_and_takes_the_next_day(tmp_path: Path) -> None:
    import tritonclient.http
    from tritonclient.utils import np_to_triton_dtype

    def answers(client: Any, exported: Ensemble, rows: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        inputs = []
        for name, array in exported.request(rows).items():
            inputs.append(tritonclient.http.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        found = client.infer("recommend", inputs)
        return found.as_numpy("items"), found.as_numpy("scores")

    for kind in (int, str):
        log = log_of(kind)
        recommender = fit_recommender(log[:150], models=EASE(5.0), **OPTIONS)
        exported = recommender.export(tmp_path / kind.__name__, k=5)
        with serve(exported.path) as server, tritonclient.http.InferenceServerClient(server.http) as client:
            for day in (recommender, recommender.refit(log[150:])):
                if day is not recommender:
                    day.export(exported.path, k=5, overwrite=True).load(client)
                rows, expected = asked(day, 5)
                check(rows, expected, *answers(client, exported, rows), 5)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    recommender = fit_recommender(log_of(int), models=EASE(5.0))
    with pytest.raises(ValueError, match="`history` must differ from the name of the users' column, got 'user'"):
        recommender.export(tmp_path / "a", history="user")
    with pytest.raises(ValueError, match="`name` must have letters"):
        recommender.export(tmp_path / "a", "../b")
    with pytest.raises(ValueError, match="`k` must be at least 1"):
        recommender.export(tmp_path / "a", k=0)
    dates = log_of(int).with_columns(pl.col("item").cast(pl.Date))
    with pytest.raises(ValueError, match="ids of items must be integers or strings, got Date"):
        fit_recommender(dates, models=EASE(5.0)).export(tmp_path / "a")
    recommender.export(tmp_path / "a")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        recommender.export(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

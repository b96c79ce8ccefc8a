"""Each recommender compared with a slow and plain computation of the same numbers; bad logs are named."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import Session
from nbdist.recsys.recommenders import EASE, IALS, ItemKNN, Popularity, Recommender

LOGS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=40)


def frame(rows: list[tuple[int, int]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=["user", "item"], orient="row")


def dense(log: pl.DataFrame) -> tuple[list[Any], list[Any], np.ndarray[Any, Any]]:
    """Users, items, and a one for each pair in the log."""
    users, items = sorted(set(log["user"])), sorted(set(log["item"]))
    matrix = np.zeros((len(users), len(items)))
    for user, item in log.iter_rows():
        matrix[users.index(user), items.index(item)] = 1.0
    return users, items, matrix


def scored(model: Recommender, log: pl.DataFrame) -> np.ndarray[Any, Any]:
    """The score of each user and item, by `recommend` alone."""
    users, items, matrix = dense(log)
    found = model.recommend(users, len(items), exclude_taken=False)
    for row, (ids, scores) in enumerate(found.select("items", "scores").iter_rows()):
        assert scores == sorted(scores, reverse=True)
        for item, score in zip(ids, scores, strict=True):
            matrix[row, items.index(item)] = score
    return matrix


@given(LOGS, st.sampled_from([0.5, 10.0]))
@settings(max_examples=25, deadline=None)
def test_ease_is_its_formula(rows: list[tuple[int, int]], regularization: float) -> None:
    log = frame(rows)
    _, items, matrix = dense(log)
    inverse = np.linalg.inv(matrix.T @ matrix + regularization * np.eye(len(items)))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0.0)
    found = scored(EASE(regularization).fit(log), log)
    np.testing.assert_allclose(found, matrix @ weights, atol=1e-5)


@given(LOGS, st.integers(1, 9), st.sampled_from([0.0, 3.0]))
@settings(max_examples=25, deadline=None)
def test_neighbors_are_those_of_loops(rows: list[tuple[int, int]], neighbors: int, shrinkage: float) -> None:
    log = frame(rows)
    _, items, matrix = dense(log)
    cosines = np.zeros((len(items), len(items)))
    for a in range(len(items)):
        for b in range(len(items)):
            norms = math.sqrt(matrix[:, a].sum() * matrix[:, b].sum())
            cosines[a, b] = 0.0 if a == b else matrix[:, a] @ matrix[:, b] / (norms + shrinkage)
    model = ItemKNN(neighbors, shrinkage).fit(log)
    if neighbors >= len(items):
        np.testing.assert_allclose(scored(model, log), matrix @ cosines, atol=1e-6)
    else:  # which of equal neighbors count is open: their sum is not
        ones = np.ones(len(items))
        highest = -np.sort(-cosines, axis=0)[:neighbors].sum(0)
        found = model.recommend_for([items], len(items), exclude_taken=False)
        by_item = dict(zip(found["items"][0], found["scores"][0], strict=True))
        np.testing.assert_allclose([by_item[item] for item in items], highest * ones, atol=1e-6)


def solved(matrix: np.ndarray[Any, Any], fixed: np.ndarray[Any, Any], lam: float, alpha: float) -> Any:
    """The vectors of `matrix`'s rows that minimize the loss, one after another."""
    dim = fixed.shape[1]
    rows = []
    for taken in matrix:
        scale = lam * (taken.sum() + alpha * len(fixed))
        system = alpha * fixed.T @ fixed + scale * np.eye(dim)
        for vector in fixed[taken > 0]:
            system += np.outer(vector, vector)
        rows.append(np.linalg.solve(system, fixed[taken > 0].sum(0)))
    return np.array(rows)


@given(LOGS, st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_each_step_of_ials_is_exact(rows: list[tuple[int, int]], iterations: int) -> None:
    log, dim, lam, alpha = frame(rows), 4, 0.05, 0.3
    _, items, matrix = dense(log)
    draw = torch.Generator().manual_seed(3)
    vectors = (torch.randn(len(items), dim, generator=draw) * (0.1 / dim**0.5)).double().numpy()
    for _ in range(iterations):
        users = solved(matrix, vectors, lam, alpha)
        vectors = solved(matrix.T, users, lam, alpha)
    expected = solved(matrix, vectors, lam, alpha) @ vectors.T
    found = scored(IALS(dim, lam, alpha, iterations, seed=3, solver_steps=None).fit(log), log)
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_users_with_many_and_few_items_are_solved_alike() -> None:
    rows = [(u, i) for u in range(60) for i in range(300) if i < u * u // 10 or (u * i) % 17 == 0]
    log = frame(rows)
    _, items, matrix = dense(log)
    model = IALS(8, 0.01, 0.1, iterations=1, solver_steps=None).fit(log)
    draw = torch.Generator().manual_seed(0)
    vectors = (torch.randn(len(items), 8, generator=draw) * (0.1 / 8**0.5)).double().numpy()
    users = solved(matrix, vectors, 0.01, 0.1)
    vectors = solved(matrix.T, users, 0.01, 0.1)
    np.testing.assert_allclose(scored(model, log), solved(matrix, vectors, 0.01, 0.1) @ vectors.T, atol=1e-3)


def test_two_ranks_learn_what_one_learns(session: Session) -> None:
    rows = [(u, (u * u + i * i) % 23) for u in range(40) for i in range(u % 9 + 1)]
    log = frame(rows)

    def learn(log: pl.DataFrame) -> list[Any]:
        return [model.fit(log) for model in (EASE(5.0), ItemKNN(5, 1.0), IALS(8, 0.01, 0.1), Popularity())]

    for one, two in zip(learn(log), session.run(learn, log), strict=True):
        np.testing.assert_allclose(scored(two, log), scored(one, log), atol=1e-4)


def test_popularity_of_late() -> None:
    log = pl.DataFrame({"user": [1, 2, 3, 4], "item": ["a", "a", "b", "b"], "day": [0.0, 1.0, 10.0, None]})
    assert Popularity().fit(log).recommend([1], 2)["items"].to_list() == [["b"]]
    found = Popularity(half_life=1).fit(log, time="day").recommend([1], 2, exclude_taken=False)
    assert found["items"].to_list() == [["b", "a"]]
    np.testing.assert_allclose(found["scores"].to_list(), [[1.0, 2**-9 + 2**-10]], rtol=1e-6)
    with pytest.raises(ValueError, match="`time` must name the column"):
        Popularity(half_life=1).fit(log)


def test_equal_scores_come_in_the_order_of_items() -> None:
    log = frame([(u, i) for u in range(3) for i in range(50)])
    assert Popularity().fit(log).recommend([0], 7, exclude_taken=False)["items"].to_list() == [[0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("form", [pl.DataFrame, pd.DataFrame, pa.table, dict, pl.LazyFrame])
def test_logs_of_any_form(form: Any) -> None:
    log = form({"who": [1, 1, 2, 2, 3], "what": ["a", "b", "a", "b", "a"]})
    model = EASE(1.0).fit(log, user="who", item="what")
    found = pickle.loads(pickle.dumps(model)).recommend([3, 1], 5)
    assert found.columns == ["user", "items", "scores"]
    assert found["items"].to_list() == [["b"], []]
    assert model.recommend_for([["a", "never seen"], []], 1)["items"].to_list() == [["b"], ["a"]]


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        (lambda: EASE(0), ValueError, "`regularization` must be a finite number above 0, got 0"),
        (lambda: IALS(dim=2.5), TypeError, "`dim` must be an integer, got 2.5"),
        (lambda: IALS(unobserved_weight=-1), ValueError, "`unobserved_weight` must be a finite number above 0"),
        (lambda: ItemKNN(neighbors=0), ValueError, "`neighbors` must be at least 1, got 0"),
        (lambda: Popularity("week"), TypeError, "`half_life` must be a number, got 'week'"),
        (lambda: EASE().recommend([1]), RuntimeError, "EASE has learned from no log yet: call fit"),
        (
            lambda: EASE().fit({"user": [1], "movie": [2]}),
            ValueError,
            "log must have a column 'item', got 'user', 'movie'",
        ),
        (
            lambda: EASE().fit({"user": [1, None], "item": [1, 2]}),
            ValueError,
            "column 'user' must have no nulls, got 1 in 2",
        ),
        (lambda: EASE().fit({"user": [1.5], "item": [1]}), TypeError, "column 'user' must be of integers, strings or"),
        (lambda: EASE().fit({"user": [[1]], "item": [1]}), TypeError, "column 'user' must be of integers, strings or"),
        (lambda: EASE().fit(frame([(1, 1)]).clear()), ValueError, "log must have rows, got none"),
        (lambda: EASE().fit([1, 2]), TypeError, "log must be a frame of polars or pandas"),
        (
            lambda: EASE().fit(frame([(1, 1)])).recommend([1, 9]),
            KeyError,
            "1 of 2 users are not in the log, the first is 9",
        ),
        (
            lambda: EASE().fit(frame([(1, 1)])).recommend(["1"]),
            TypeError,
            "ids must be Int64, as in the log or index, got String",
        ),
        (lambda: EASE().fit(frame([(1, 1)])).recommend([1], 0), ValueError, "`k` must be at least 1, got 0"),
        (lambda: EASE().fit(frame([(1, 1)])).recommend_for([3]), TypeError, "ids must be a list for each row"),
    ],
)
def test_mistakes_are_named(action: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        action()


def test_more_items_than_fit_into_memory_are_refused_before_they_are_counted() -> None:
    log = pl.DataFrame({"user": np.zeros(200_000, np.int64), "item": np.arange(200_000)})
    with pytest.raises(MemoryError, match="EASE of 200,000 items"):
        EASE().fit(log)

"""Invented data holds what it promises: shape, popularity, and a structure that can be learned."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys.datasets.synthetic import synthetic_multislot, synthetic_ratings


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    users, items = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return users, items, draw(st.integers(max(users, items), users * items))


@given(sizes(), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_shape_asked_for_with_everyone_in_it_and_no_pair_twice(size: tuple[int, int, int], seed: int) -> None:
    users, items, ratings = size
    frame, movies, source = synthetic_ratings(users, items, ratings, seed=seed)
    assert frame.columns == ["user", "movie", "rating", "timestamp"] and frame.height == ratings
    assert not frame.select("user", "movie").is_duplicated().any()
    assert set(frame["user"]) == set(range(1, users + 1))
    assert set(frame["movie"]) == set(range(1, items + 1)) == set(movies["movie"])
    assert set(frame["rating"]) <= {1, 2, 3, 4, 5}
    assert movies["title"].n_unique() == items and movies["genres"].list.len().is_between(1, 3).all()
    assert (movies["genres"].list.n_unique() == movies["genres"].list.len()).all()
    assert "NOT MovieLens" in source


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_reproducible_and_seeds_differ(seed: int) -> None:
    one, again, other = (synthetic_ratings(20, 30, 200, seed=s) for s in (seed, seed, seed + 1))
    assert one.frame.equals(again.frame) and one.movies.equals(again.movies)
    assert not one.frame.equals(other.frame)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in blocks of some users, it is still one set."""
    monkeypatch.setattr("nbdist.recsys.datasets.synthetic._BLOCK", 1000)
    frame = synthetic_ratings(300, 200, 20_000).frame
    assert not frame.select("user", "movie").is_duplicated().any() and frame["user"].n_unique() == 300
    assert frame["movie"].n_unique() == 200


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    synthetic_ratings(5, 5, 10)
    synthetic_multislot(5)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


@pytest.mark.parametrize("size", [(0, 5, 5), (5, 0, 5), (5, 9, 8), (3, 3, 10)])
def test_impossible_sizes_are_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        synthetic_ratings(*size)


def test_titles_stay_unique_beyond_the_word_lists() -> None:
    assert synthetic_ratings(1, 6000, 6000).movies["title"].n_unique() == 6000


@pytest.mark.parametrize(
    ("size", "top", "median"),  # of MovieLens 100k, 1m: its most popular movie's ratings, and the median movie's
    [((943, 1682, 100_000), 583, 27), ((6040, 3706, 1_000_209), 3428, 123.5)],
)
def test_popularity_is_that_of_movielens(size: tuple[int, int, int], top: int, median: float) -> None:
    frame = synthetic_ratings(*size).frame
    counts = frame["movie"].value_counts()["count"]
    assert 0.4 < counts.max() / top < 1.3 and 0.4 < counts.median() / median < 2  # type: ignore[operator]
    users = frame["user"].value_counts()["count"]
    assert 1.3 < users.mean() / users.median() < 2.2, "1.6 and 1.7 there"  # type: ignore[operator]
    liked = frame.group_by("movie").agg(pl.len(), pl.mean("rating")).sort("len")
    assert liked[-len(liked) // 5 :]["rating"].mean() > liked[: len(liked) // 5]["rating"].mean() + 0.2  # type: ignore[operator]


@pytest.mark.parametrize("seed", [42, 7])
def test_a_fitted_model_beats_the_mean(seed: int) -> None:
    """Alternating least squares on four fifths predicts the rest with at most 0.65 of the mean's squared error."""
    frame = synthetic_ratings(seed=seed).frame
    user, movie = frame["user"].to_numpy() - 1, frame["movie"].to_numpy() - 1
    rating = frame["rating"].to_numpy().astype(float)
    valid = np.random.default_rng(0).random(len(frame)) < 0.2
    predicted = least_squares(user[~valid], movie[~valid], rating[~valid])[user[valid], movie[valid]]
    error, variance = np.mean((predicted - rating[valid]) ** 2), rating[valid].var()
    assert error < 0.65 * variance


def test_genres_carry_information_about_taste() -> None:
    """Users differ in which genres they like, beyond what they and the movies are rated on average."""
    frame, movies, _ = synthetic_ratings(300, 1000, 60_000)
    rated = frame.join(movies, on="movie").with_columns(
        rest=pl.col("rating") - pl.mean("rating").over("user") - pl.mean("rating").over("movie")
    )
    half = pl.col("timestamp") % 2 == 0
    means = rated.explode("genres").group_by("user", "genres").agg(pl.mean("rest").alias("m"), pl.len())
    parts = [
        part.explode("genres").group_by("user", "genres").agg(pl.mean("rest"), pl.len())
        for part in (rated.filter(half), rated.filter(~half))
    ]
    both = parts[0].join(parts[1], on=["user", "genres"]).filter(pl.min_horizontal("len", "len_right") >= 10)
    assert means.height > 1000 and both.select(pl.corr("rest", "rest_right")).item() > 0.25


def least_squares(
    user: np.ndarray, movie: np.ndarray, rating: np.ndarray, rank: int = 4, rounds: int = 6
) -> np.ndarray:
    """Biases and `rank` factors by alternating ridge regressions; every prediction, (n_users, n_movies)."""
    mean = rating.mean()
    # Each side is [factors, own bias, 1]: the 1 meets the other side's bias.
    rng = np.random.default_rng(0)
    sides = [rng.normal(0, 0.1, (index.max() + 1, rank + 1)) for index in (user, movie)]
    for _ in range(rounds):
        for this, that, mine, other in ((0, 1, user, movie), (1, 0, movie, user)):
            inputs = np.c_[sides[that][other, :rank], np.ones(len(rating))]  # (n, rank + 1)
            target = rating - mean - sides[that][other, rank]  # (n,)
            n = len(sides[this])
            gram, moment = np.zeros((n, rank + 1, rank + 1)), np.zeros((n, rank + 1))
            np.add.at(gram, mine, inputs[:, :, None] * inputs[:, None, :])
            np.add.at(moment, mine, inputs * target[:, None])
            sides[this] = np.linalg.solve(gram + 6.0 * np.eye(rank + 1), moment[:, :, None])[:, :, 0]
    users, movies = sides
    return mean + users[:, :rank] @ movies[:, :rank].T + users[:, [rank]] + movies[:, rank]


@pytest.mark.long("25 million ratings")
def test_movielens_25m_in_well_under_a_minute_and_bounded_memory() -> None:
    """In a process of its own: what it needs at the most, in addition to the libraries."""
    code = """
import resource, time
from nbdist.recsys.datasets.synthetic import synthetic_ratings
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
synthetic_ratings()
before, began = peak(), time.process_time()
data = synthetic_ratings(162_541, 59_047, 25_000_095)
print(time.process_time() - began, peak() - before, data.frame.height, data.frame["movie"].n_unique())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, memory, rows, movies = map(float, done.stdout.split())
    print(f"{seconds:.1f} s of CPU time, {memory / 1e6:,.0f} MB")
    assert (rows, movies) == (25_000_095, 59_047)
    assert seconds < 40 and memory < 1.5e9


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(5, 50), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_multislot_shapes(samples: int, slots: int, keys: int, vocabulary: int, seed: int) -> None:
    data, again = (synthetic_multislot(samples, slots, keys, vocabulary, seed=seed) for _ in range(2))
    assert data.keys.shape == (samples, slots, keys) and data.keys.dtype == np.int32
    each = vocabulary // slots
    assert (data.keys // each == np.arange(slots)[:, None]).all(), "each slot has keys of its own"
    assert (np.diff(data.keys, axis=2) <= 0).all(), "the largest first"
    assert data.keys.max() < vocabulary and (samples * keys < 30 * each or len(np.unique(data.keys)) == slots * each)
    assert data.labels.shape == (samples,) and set(data.labels) <= {0.0, 1.0}
    assert (data.keys == again.keys).all() and (data.labels == again.labels).all()


def test_multislot_labels_can_be_learned() -> None:
    """Least squares on how often each key comes, without even the slots, ranks other samples far above chance."""
    keys, labels, vocabulary = *synthetic_multislot(6000, 20, 5, 200), 200
    counts = np.stack([np.bincount(row.ravel(), minlength=vocabulary) for row in keys])  # (samples, vocabulary)
    weights = np.linalg.lstsq(counts[:5000], labels[:5000] - labels.mean(), rcond=None)[0]
    scores, truth = counts[5000:] @ weights, labels[5000:] == 1
    assert 0.4 < labels.mean() < 0.6
    assert (scores[truth][:, None] > scores[~truth]).mean() > 0.8  # AUC


@pytest.mark.parametrize("size", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (1, 1, 1, 2**31 + 1)])
def test_multislot_refuses_impossible_sizes(size: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        synthetic_multislot(*size)
    with pytest.raises(ValueError, match="`vocabulary` must be at least 5, a key for each slot, got 4"):
        synthetic_multislot(1, 5, 1, 4)

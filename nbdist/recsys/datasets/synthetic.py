"""Synthetic data with the shape of known sets, and with a structure to learn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .ratings import GENRES, SCHEMA, Ratings

_BLOCK = 1 << 18
"""The number of ratings, or keys, that are made at a time. The working memory is proportional to it."""

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]


def synthetic_ratings(n_users: int = 943, n_items: int = 1682, n_ratings: int = 100_000, *, seed: int = 42) -> Ratings:
    """Make ratings with MovieLens-like popularity and a structure that a model can learn.

    A rating is ``3.5 + user bias + movie bias + <user taste, movie character> + noise``, rounded and clipped to 1..5;
    tastes and characters have 4 dimensions. About half of the variance is structure. Half of a movie's character comes
    from its one to three genres, half is its own. A pair of user and movie occurs at most once, every user and every
    movie at least once, and the rows are in random order. The numbers of ratings have a long tail: few busy users, few
    popular movies. Popular movies are liked more.

    Uses 30 bytes per rating while it runs, 20 of them for the result, and no Python object per rating: 25 million
    ratings by 162,541 users of 59,047 movies take some ten seconds on one core.

    Args:
        n_users: The number of users, who are numbered from 1.
        n_items: The number of movies, which are numbered from 1, each with its own invented title.
        n_ratings: The number of rows to return.
        seed: Equal seeds give equal ratings; the global generators have no effect.

    Raises:
        ValueError: A size is not positive, or `n_ratings` is smaller than the number of users or of movies, or larger
            than the number of pairs.

    Examples:
        >>> from nbdist.recsys.datasets import synthetic_ratings
        >>> ratings, movies, source = synthetic_ratings(n_users=50, n_items=20, n_ratings=400)
        >>> ratings.shape, movies.shape
        ((400, 4), (20, 3))
        >>> print(source)
        Synthetic ratings, NOT MovieLens: 400 ratings by 50 users of 20 movies, with invented tastes (seed 42).
    """
    if min(n_users, n_items) < 1:
        raise ValueError(f"n_users and n_items must be positive, got {n_users} and {n_items}")
    most = max(n_users, n_items)
    if not most <= n_ratings <= n_users * n_items:
        raise ValueError(
            f"n_ratings must be in {most}..{n_users * n_items} to cover all users and items, got {n_ratings}"
        )
    rng = np.random.default_rng(seed)
    rate = rng.permutation(_popularity(n_users, n_items, n_ratings))
    pairs = _pairs(rate, n_users, n_ratings, rng)

    popular = np.log(rate)
    popular = (popular - popular.mean()) / (popular.std() or 1.0)
    user_bias = rng.normal(0.0, 0.40, n_users)
    item_bias = rng.normal(-0.35, 0.40, n_items) + 0.25 * popular
    movies, genre = _movies(n_items, rng)
    taste = rng.normal(size=(n_users, 4))
    character = 0.28 * np.sqrt(0.5) * (genre + rng.normal(size=(n_items, 4)))

    columns = {name: np.empty(n_ratings, kind) for name, kind in zip(SCHEMA, ("i4", "i4", "f4", "i8"), strict=True)}
    for start in range(0, n_ratings, _BLOCK):
        block = slice(start, start + _BLOCK)
        user, item = np.divmod(pairs[block], n_items)  # each (rows of the block,)
        match = np.einsum("nk,nk->n", taste[user], character[item])
        wish = 3.5 + user_bias[user] + item_bias[item] + match + rng.normal(0.0, 0.72, len(user))
        columns["user"][block] = user + 1
        columns["movie"][block] = item + 1
        columns["rating"][block] = np.clip(np.rint(wish), 1, 5)
        columns["timestamp"][block] = rng.integers(874_724_710, 893_286_639, len(user))  # MovieLens 100k's, 1997-98
    del pairs
    # One by one, because polars copies them.
    frame = pl.DataFrame([pl.Series(name, columns.pop(name), kind) for name, kind in SCHEMA.items()])
    sizes = f"{n_ratings:,} ratings by {n_users:,} users of {n_items:,} movies"
    return Ratings(frame, movies, f"Synthetic ratings, NOT MovieLens: {sizes}, with invented tastes (seed {seed}).")


def _popularity(n_users: int, n_items: int, n_ratings: int) -> _Floats:
    """The probability that each movie is drawn, not normalized, the most popular movie first; shape (n_items,).

    In MovieLens 100k, 1m and 25m, about half of the users have rated the most popular movie, and one user the least
    popular. The counts between are roughly ``users / 2 * exp(-steep * x ** bend)`` for x from 0 to 1, with a bend such
    that they add up to the number of ratings: 0.8 for the two small sets, 0.35 for the large one.
    """
    top = max(n_users / 2, 2.0)
    x = np.linspace(0.0, 1.0, n_items)
    low, high = 0.05, 20.0
    for _ in range(40):
        bend = (low + high) / 2
        enough = top * np.exp(-np.log(top) * x**bend).sum() >= n_ratings
        low, high = (low, bend) if enough else (bend, high)
    rate: _Floats = np.exp(-np.log(top) * x**high)
    return rate


def _pairs(rate: _Floats, n_users: int, n_ratings: int, rng: np.random.Generator) -> _Integers:
    """Draw pairs of user and item, each once, in random order: ``user * n_items + item``; shape (n_ratings,)."""
    n_items = len(rate)
    # Each movie gets one user to begin with, so that none is left out.
    first = np.sort(rng.permutation(n_users)[np.arange(n_items) % n_users] * n_items + np.arange(n_items))
    least = np.maximum(1, np.bincount(first // n_items, minlength=n_users))
    counts = _shares(np.exp(rng.normal(0.0, 1.0, n_users)), least, n_items, n_ratings)
    ends = np.cumsum(counts)
    pairs = np.empty(n_ratings, np.int64)
    start = 0
    while start < n_users:
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _BLOCK, "right")))
        own = first[slice(*np.searchsorted(first, [start * n_items, stop * n_items]))]
        pairs[done : ends[stop - 1]] = start * n_items + _draw(counts[start:stop], own - start * n_items, rate, rng)
        start = stop
    rng.shuffle(pairs)
    return pairs


def _shares(weight: _Floats, least: _Integers, most: int, total: int) -> _Integers:
    """Return integers nearly proportional to `weight`, each in least..most, that add up to `total`."""
    low, high = 0.0, most / weight.min()
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(weight * scale, least, most).sum() <= total else (low, scale)
    counts = np.floor(np.clip(weight * low, least, most)).astype(np.int64)
    counts[np.flatnonzero(counts < most)[: total - counts.sum()]] += 1  # what rounding down has left
    return counts


def _draw(counts: _Integers, pairs: _Integers, rate: _Floats, rng: np.random.Generator) -> _Integers:
    """Draw `counts` different movies for each of some users, weighted by `rate`.

    Args:
        counts: The number of movies for each user, shape (users,).
        pairs: The pairs that exist already, as ``user * n_items + item``.
        rate: Shape (n_items,).

    Returns:
        All pairs, those given too, shape (counts.sum(),).
    """
    n_items, counts, done = len(rate), counts.copy(), []
    cumulative = np.cumsum(rate)
    cumulative /= cumulative[-1]
    for _ in range(6):
        # To draw with replacement, and again for what came twice, is to draw without replacement.
        users = np.repeat(np.arange(len(counts)), counts - np.bincount(pairs // n_items, minlength=len(counts)))
        items = np.searchsorted(cumulative, rng.random(len(users)), "right")
        pairs = np.sort(np.concatenate([pairs, users * n_items + items]))
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        owner = pairs // n_items
        lacks = np.bincount(owner, minlength=len(counts)) < counts
        done.append(pairs[~lacks[owner]])
        pairs, counts = pairs[lacks[owner]], np.where(lacks, counts, 0)
    # Who has seen most of what is popular would have to draw for long. The same draw: each movie waits for a time that
    # is exponential with its rate, and the first come first.
    for user in np.flatnonzero(counts):
        seen = pairs[slice(*np.searchsorted(pairs, [user * n_items, (user + 1) * n_items]))] - user * n_items
        waits = rng.standard_exponential(n_items) / rate
        waits[seen] = -1.0
        done.append(user * n_items + np.argpartition(waits, counts[user] - 1)[: counts[user]])
    return np.concatenate(done)


def _movies(n: int, rng: np.random.Generator) -> tuple[pl.DataFrame, _Floats]:
    """Make `n` movies as in `Ratings`, and the characters of their genres, shape (n, 4), with unit variance."""
    weight = rng.permutation(np.linspace(0.0, 3.0, len(GENRES)))  # log: some genres have many movies
    order = np.argsort(-(weight + rng.gumbel(size=(n, len(GENRES)))), axis=1)[:, :3]  # (n, 3)
    counts = rng.integers(1, 4, n)
    like = rng.normal(size=(len(GENRES), 4))
    sums = (like[order] * (np.arange(3) < counts[:, None])[:, :, None]).sum(axis=1)
    genres = [[GENRES[genre] for genre in row[:count]] for row, count in zip(order, counts, strict=True)]
    frame = pl.DataFrame(
        {"movie": np.arange(1, n + 1, dtype="i4"), "title": _titles(n, rng), "genres": genres},
        schema_overrides={"genres": pl.List(pl.String)},
    )
    return frame, sums / np.sqrt(counts[:, None])


def _titles(n: int, rng: np.random.Generator) -> list[str]:
    """Make `n` different synthetic titles."""
    adjectives = (
        "Amber Borrowed Brittle Careful Copper Crooked Distant Drowsy Empty Faded Folded Gentle Hollow "
        "Honest Idle Ivory Jagged Late Lopsided Mild Narrow Northern Painted Patient Quiet Restless "
        "Rusted Salted Scarlet Second Silent Slanted Sleepless Slow Sudden Tangled Thirteenth Unlit "
        "Velvet Wandering Whispering Winter"
    ).split()
    nouns = (
        "Almanac Anchor Attic Barometer Beekeeper Bicycle Bridge Cartographer Chimney Clockmaker "
        "Corridor Ferry Footpath Glacier Greenhouse Harbor Hinge Jetty Kettle Lantern Ledger Lighthouse "
        "Locksmith Meadow Mill Orchard Parlor Pier Postcard Quarry Raincoat Reservoir Sawmill Scarecrow "
        "Signal Staircase Suitcase Teapot Tide Umbrella Viaduct Weathervane"
    ).split()
    names = [f"The {adjective} {noun}" for adjective in adjectives for noun in nouns]
    order, years = rng.permutation(len(names)), rng.integers(1930, 1999, n)
    sequels = ["", *(f" {part}" for part in range(2, n // len(names) + 2))]
    return [f"{names[order[i % len(names)]]}{sequels[i // len(names)]} ({years[i]})" for i in range(n)]


class MultiSlot(NamedTuple):
    """Samples with several slots (feature fields), the same number of keys in each, and a label.

    Examples:
        >>> from nbdist.recsys.datasets import synthetic_multislot
        >>> samples = synthetic_multislot(samples=8, slots=3, keys_per_slot=2, vocabulary=50)
        >>> samples.keys[0].shape  # the first sample's
        (3, 2)
        >>> samples.labels.shape
        (8,)
    """

    keys: NDArray[np.int32]
    """The keys, shape (samples, slots, keys per slot), each from 0 to vocabulary - 1. Each slot has its own keys, in
    descending order."""
    labels: NDArray[np.float32]
    """The labels, 0 or 1, shape (samples,)."""


def synthetic_multislot(
    samples: int = 245_760, slots: int = 100, keys_per_slot: int = 10, vocabulary: int = 8192, *, seed: int = 42
) -> MultiSlot:
    """Make samples as in the DenseDemo of NVIDIA's SparseOperationKit, with labels that a model can learn.

    As there (``generate_random_samples`` in its ``utils.py``), each slot has an equal part of the vocabulary: with v
    keys in a slot, slot s has the keys ``s * v .. (s + 1) * v - 1``, drawn uniformly, and sorted in each sample in
    descending order. The labels there are random. Here every key and every slot has a weight, and the log odds of a
    label of 1 are 3 times the normalized sum of their products. With the true weights the AUC is about 0.9.

    The full size takes 1 GB and some seconds.

    Args:
        samples: The number of samples.
        slots: The number of slots of each sample.
        keys_per_slot: The number of keys in each slot.
        vocabulary: The number of different keys of all slots together; each slot has an equal number, and the remainder
            is not used.
        seed: Equal seeds give equal samples.

    Raises:
        ValueError: A size is not positive, there are fewer keys than slots, or more keys than int32 has values.

    Examples:
        >>> from nbdist.recsys.datasets import synthetic_multislot
        >>> keys, labels = synthetic_multislot(samples=1000, slots=3, keys_per_slot=2, vocabulary=50)
        >>> keys.shape, labels.shape
        ((1000, 3, 2), (1000,))
        >>> bool(keys.max() < 50), sorted(set(labels.tolist()))
        (True, [0.0, 1.0])
    """
    if min(samples, slots, keys_per_slot, vocabulary) < 1 or vocabulary > 2**31:
        raise ValueError(
            "samples, slots, keys_per_slot and vocabulary must be positive, and the last at most 2**31, got "
            f"{samples}, {slots}, {keys_per_slot} and {vocabulary}"
        )
    if vocabulary < slots:
        raise ValueError(f"`vocabulary` must be at least {slots}, a key for each slot, got {vocabulary}")
    each = vocabulary // slots
    first = np.arange(slots, dtype=np.int32)[:, None] * np.int32(each)  # (slots, 1)
    rng = np.random.default_rng(seed)
    weight, importance = rng.standard_normal((slots, each), np.float32), rng.uniform(0.5, 1.5, slots)
    weight -= weight.mean(axis=1, keepdims=True)  # as many labels of 1 as of 0
    weight = weight.ravel()
    importance *= 3 / np.sqrt(keys_per_slot * (importance**2).sum())
    keys, labels = np.empty((samples, slots, keys_per_slot), np.int32), np.empty(samples, np.float32)
    rows = max(1, _BLOCK // (slots * keys_per_slot))
    for start in range(0, samples, rows):
        block = keys[start : start + rows]
        block[:] = np.sort(rng.integers(0, each, block.shape, dtype=np.int32), axis=2)[:, :, ::-1] + first
        odds = weight[block].sum(axis=2) @ importance  # (rows,)
        labels[start : start + rows] = rng.random(len(odds)) < 1 / (1 + np.exp(-odds))
    return MultiSlot(keys, labels)

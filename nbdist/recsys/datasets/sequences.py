"""Synthetic histories with a rule: their last two items determine the next one."""

from __future__ import annotations

import numpy as np
import polars as pl


def synthetic_sequences(
    n_users: int = 1000, n_items: int = 100, length: int = 20, *, habits: int = 2, seed: int = 42
) -> pl.DataFrame:
    """Make histories of users with habits: a user with a habit always goes from an item to the same next item.

    A habit is a cycle over all items, in an order of its own, and a user walks along the cycle of their habit from any
    item on. The last two items of a history determine the habit, and so the next item (except where two cycles share a
    step, which happens for about one item in `n_items`). The last item alone leaves one possibility for each habit: a
    prediction from the last item is right once in `habits` times, and a prediction by popularity once in `n_items`
    times.

    Args:
        n_users: The number of users, who are numbered from 1.
        n_items: The number of items, which are numbered from 1.
        length: The number of items of each history. If it is larger than `n_items`, the cycle begins again.
        habits: The number of habits.
        seed: Equal seeds give equal histories.

    Returns:
        Columns `user`, `movie` and `timestamp`, as ratings have them; rows in random order.

    Raises:
        ValueError: A size is not positive, or there are fewer than two items.

    Examples:
        >>> from nbdist.recsys.datasets import synthetic_sequences
        >>> from nbdist.recsys.etl import sequences
        >>> rows = synthetic_sequences(n_users=5, n_items=10, length=4)
        >>> rows.columns, rows.height
        (['user', 'movie', 'timestamp'], 20)
        >>> sequences(rows, "movie")["movie"].list.len().to_list()
        [4, 4, 4, 4, 4]
    """
    if min(n_users, length, habits) < 1 or n_items < 2:
        raise ValueError(
            f"n_users={n_users}, length={length} and habits={habits} must be positive, and n_items={n_items} at least 2"
        )
    rng = np.random.default_rng(seed)
    tours = np.stack([rng.permutation(n_items) for _ in range(habits)])  # (habits, items)
    habit, start = rng.integers(0, habits, n_users), rng.integers(0, n_items, n_users)
    place = (start[:, None] + np.arange(length)) % n_items  # (users, length)
    frame = pl.DataFrame(
        {
            "user": np.repeat(np.arange(1, n_users + 1), length),
            "movie": tours[habit[:, None], place].ravel() + 1,
            "timestamp": np.tile(np.arange(length), n_users),
        },
        schema={"user": pl.Int32, "movie": pl.Int32, "timestamp": pl.Int64},
    )
    return frame[rng.permutation(len(frame))]

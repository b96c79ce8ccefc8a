"""The common form of all ratings."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

SCHEMA = {"user": pl.Int32, "movie": pl.Int32, "rating": pl.Float32, "timestamp": pl.Int64}

GENRES = (
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
"""Genres of MovieLens 100k, in the order of its ``u.item``."""


class Ratings(NamedTuple):
    """Ratings, their movies, and the source of both: ``ratings, movies, source = movielens("25m")``.

    Examples:
        >>> from nbdist.recsys.datasets import synthetic_ratings
        >>> data = synthetic_ratings(n_users=50, n_items=20, n_ratings=400)
        >>> data.frame.columns, data.frame.height
        (['user', 'movie', 'rating', 'timestamp'], 400)
        >>> data.movies.columns
        ['movie', 'title', 'genres']
        >>> data.with_titles().columns
        ['user', 'movie', 'rating', 'timestamp', 'title']
    """

    frame: pl.DataFrame
    """A row per rating: `user` and `movie` (Int32, from 1), `rating` (Float32, 0.5 to 5), `timestamp` (Int64,
    seconds since 1970-01-01 UTC)."""
    movies: pl.DataFrame
    """A row per movie: `movie` (Int32), `title` (String, "Name (year)"), `genres` (List(String), may be empty)."""
    source: str
    """The source of the rows, in a sentence to print with the results."""

    def with_titles(self) -> pl.DataFrame:
        """Return the ratings, in their order, with the movies' titles in a further column. Use `.to_pandas()` for
        fastai."""
        return self.frame.join(self.movies.select("movie", "title"), on="movie", how="left", maintain_order="left")

"""Ratings to train recommenders on: MovieLens from disk or the network, and synthetic ratings; see `Ratings`."""

from .grouplens import movielens
from .ratings import Ratings
from .sequences import synthetic_sequences
from .synthetic import MultiSlot, synthetic_multislot, synthetic_ratings

__all__ = ["MultiSlot", "Ratings", "movielens", "synthetic_multislot", "synthetic_ratings", "synthetic_sequences"]

"""Recommenders that learn from a log of users and items alone, and a comparison of recommenders under one protocol."""

from .base import Recommender
from .comparison import Candidate, Comparison, benchmark
from .ease import EASE
from .fitted import FittedRecommender
from .fitting import fit_recommender
from .ials import IALS
from .neighbors import ItemKNN
from .popularity import Popularity
from .protocols import ByTime, LeaveOneOut

__all__ = [
    "EASE",
    "IALS",
    "ByTime",
    "Candidate",
    "Comparison",
    "FittedRecommender",
    "ItemKNN",
    "LeaveOneOut",
    "Popularity",
    "Recommender",
    "benchmark",
    "fit_recommender",
]

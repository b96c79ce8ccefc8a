"""The quality of a recommender, over all ranks: AUC, log loss, RMSE; recall, NDCG, hit rate, MRR of ranked items."""

from .calibration import Calibration, NormalizedEntropy
from .catalog import catalog_metrics
from .ranked_items import ranking_metrics
from .ranking import GAUC, MAP, MRR, NDCG, HitRate, Recall
from .rows import AUC, RMSE, LogLoss, Throughput

__all__ = [
    "AUC",
    "GAUC",
    "MAP",
    "MRR",
    "NDCG",
    "RMSE",
    "Calibration",
    "HitRate",
    "LogLoss",
    "NormalizedEntropy",
    "Recall",
    "Throughput",
    "catalog_metrics",
    "ranking_metrics",
]

"""The quality of a recommender, over all ranks: AUC, log loss, RMSE; recall, NDCG, hit rate, MRR of ranked items."""

from .ranked_items import ranking_metrics
from .ranking import MRR, NDCG, HitRate, Recall
from .rows import AUC, RMSE, LogLoss, Throughput

__all__ = ["AUC", "MRR", "NDCG", "RMSE", "HitRate", "LogLoss", "Recall", "Throughput", "ranking_metrics"]

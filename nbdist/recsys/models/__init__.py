"""Recommender models of plain torch modules, for `replicate`, `shard` and `export_ensemble`."""

from .dcn import DCNv2
from .deepfm import DeepFM
from .dlrm import DLRM
from .multi_task import PLE, MMoE
from .sasrec import SASRec, padded
from .softmax import draw_rows, softmax_logits
from .tables import PooledTables, SequenceTables
from .two_tower import Tower, TwoTower

__all__ = [
    "DLRM",
    "PLE",
    "DCNv2",
    "DeepFM",
    "MMoE",
    "PooledTables",
    "SASRec",
    "SequenceTables",
    "Tower",
    "TwoTower",
    "draw_rows",
    "padded",
    "softmax_logits",
]

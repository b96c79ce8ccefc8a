"""Recommender models of plain torch modules, for `replicate`, `shard` and `export_ensemble`."""

from .calibrated import calibrated_bce
from .dcn import DCNv2
from .deepfm import DeepFM
from .dlrm import DLRM
from .hstu import HSTU
from .multi_task import PLE, MMoE
from .next_item import padded
from .one_table import OneTable
from .position_bias import PositionBias
from .sasrec import SASRec
from .softmax import draw_rows, hard_negatives, softmax_logits
from .tables import PooledTables, SequenceTables
from .two_tower import Tower, TwoTower

__all__ = [
    "DLRM",
    "HSTU",
    "PLE",
    "DCNv2",
    "DeepFM",
    "MMoE",
    "OneTable",
    "PooledTables",
    "PositionBias",
    "SASRec",
    "SequenceTables",
    "Tower",
    "TwoTower",
    "calibrated_bce",
    "draw_rows",
    "hard_negatives",
    "padded",
    "softmax_logits",
]

"""Preparation of training files from raw ratings: join, categorify, label, shuffle; on one rank or many."""

from .histories import sequences, with_history, write_history
from .ops.categorify import Categorify
from .ops.compute import Compute
from .ops.crossing import HashedCross
from .ops.drop import Drop
from .ops.elementwise import Bucketize, Clip, FillMissing, ListSlice, Log
from .ops.groupby import JoinGroupby
from .ops.join import Join
from .ops.normalizing import Normalize, NormalizeMinMax
from .ops.round import Round
from .ops.rows import DifferenceLag, Filter
from .ops.target_encoding import TargetEncoding
from .splitting import Split, leave_one_out, time_split
from .unknown import fill_unknown
from .vocabulary import Vocabulary
from .workflow import Workflow

__all__ = [
    "Bucketize",
    "Categorify",
    "Clip",
    "Compute",
    "DifferenceLag",
    "Drop",
    "FillMissing",
    "Filter",
    "HashedCross",
    "Join",
    "JoinGroupby",
    "ListSlice",
    "Log",
    "Normalize",
    "NormalizeMinMax",
    "Round",
    "Split",
    "TargetEncoding",
    "Vocabulary",
    "Workflow",
    "fill_unknown",
    "leave_one_out",
    "sequences",
    "time_split",
    "with_history",
    "write_history",
]

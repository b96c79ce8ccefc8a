"""From ratings on disk to files that models are trained from: join, categorify, label, shuffle; on one rank or many."""

from .crossing import HashedCross
from .elementwise import Bucketize, Clip, FillMissing, ListSlice, Log
from .groupby import JoinGroupby
from .histories import sequences, with_history, write_history
from .normalizing import Normalize, NormalizeMinMax
from .rows import DifferenceLag, Filter
from .splitting import Split, leave_one_out, time_split
from .steps import Categorify, Compute, Drop, Join
from .target_encoding import TargetEncoding
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

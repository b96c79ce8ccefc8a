"""From ratings on disk to files that models are trained from: join, categorify, label, shuffle; on one rank or many."""

from .crossing import HashedCross
from .elementwise import Bucketize, Clip, FillMissing, ListSlice, Log
from .histories import sequences, with_history
from .splitting import Split, leave_one_out, time_split
from .steps import Categorify, Compute, Drop, Join
from .unknown import fill_unknown
from .vocabulary import Vocabulary
from .workflow import Workflow

__all__ = [
    "Bucketize",
    "Categorify",
    "Clip",
    "Compute",
    "Drop",
    "FillMissing",
    "HashedCross",
    "Join",
    "ListSlice",
    "Log",
    "Split",
    "Vocabulary",
    "Workflow",
    "fill_unknown",
    "leave_one_out",
    "sequences",
    "time_split",
    "with_history",
]

"""Run a function of a notebook on every GPU, or on CPU ranks, with one line."""

from .errors import CaptureError, NbdistError, RankDied, RankTimeout
from .explanation import explain
from .launch import in_ddp, warm
from .magic import load_ipython_extension
from .session import Session

__all__ = [
    "CaptureError",
    "NbdistError",
    "RankDied",
    "RankTimeout",
    "Session",
    "explain",
    "in_ddp",
    "load_ipython_extension",
    "warm",
]
__version__ = "0.1.0"

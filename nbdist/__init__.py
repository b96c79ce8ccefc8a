"""Run a function of a notebook on every GPU, or on CPU ranks, with one line."""

from .errors import CaptureError, NbdistError, RankDied, RankTimeout
from .launch import in_ddp, warm
from .session import Session

__all__ = ["CaptureError", "NbdistError", "RankDied", "RankTimeout", "Session", "in_ddp", "warm"]
__version__ = "0.1.0"

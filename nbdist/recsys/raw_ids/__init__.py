"""Embedding tables of raw ids, which gain and lose rows during training."""

from .options import RawIds
from .table import RawTable

__all__ = ["RawIds", "RawTable"]

"""Embedding tables whose rows belong to raw ids, and come and go in training."""

from .options import RawIds
from .table import RawTable

__all__ = ["RawIds", "RawTable"]

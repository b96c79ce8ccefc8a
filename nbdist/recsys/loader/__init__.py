"""Batches for every rank, from Parquet files or from memory: equal steps, one shuffle for all, resumable."""

from .columns import keyed_jagged
from .loaders import MemoryLoader, ParquetLoader

__all__ = ["MemoryLoader", "ParquetLoader", "keyed_jagged"]

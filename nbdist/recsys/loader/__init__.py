"""Batches for every rank, from Parquet files or from memory: equal numbers of steps, one shuffle for all, resumable."""

from .columns import Ragged, keyed_jagged
from .loaders import MemoryLoader, ParquetLoader

__all__ = ["MemoryLoader", "ParquetLoader", "Ragged", "keyed_jagged"]

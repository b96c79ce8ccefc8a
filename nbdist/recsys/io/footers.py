"""Footers of Parquet files, each parsed once while its file does not change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from . import storage

_ROOM = 1 << 25  # bytes of footers, as files have them, that are kept of local files


class Footers:
    """A cache of parsed footers for opening files: parsing takes time for each row group.

    Footers of remote files are kept, because reading them takes long. Footers of local files are kept until the file
    changes; only the most recent ones are kept, and they are not sent to other processes.
    """

    def __init__(self) -> None:
        self._remote: dict[str, pq.FileMetaData] = {}
        self._local: dict[Path, tuple[Any, pq.FileMetaData]] = {}
        """A mapping from each path to the state of the file, and its footer. The latest used path is the last."""

    def open(self, location: storage.Location) -> pq.ParquetFile:
        """Open a file. Raises the exceptions of `storage.parquet`."""
        if isinstance(location, str):
            opened = storage.parquet(location, self._remote.get(location))
            self._remote[location] = opened.metadata
            return opened
        found = os.stat(location)
        state = found.st_ino, found.st_size, found.st_mtime_ns
        before, footer = self._local.pop(location, (None, None))
        opened = storage.parquet(location, footer if before == state else None)
        self._local[location] = state, opened.metadata
        while len(self._local) > 1 and sum(footer.serialized_size for _, footer in self._local.values()) > _ROOM:
            self._local.pop(next(iter(self._local)))
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_local": {}}

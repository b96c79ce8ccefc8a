"""Reading of a checkpoint without running code from its files.

torch unpickles the file `.metadata` of a checkpoint, and entries that are not tensors, without restriction. Here, both
may contain only the types that `save` writes.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class Reader(dcp.FileSystemReader):
    """A reader of a checkpoint's files that refuses a `.metadata` that `save` cannot have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of the checkpoint, and their positions in the files.

        Raises:
            FileNotFoundError: There is no checkpoint.
            ValueError: `.metadata` is not the description of a checkpoint.
        """
        path = Path(self.path) / ".metadata"
        with open(path, "rb") as file:
            try:
                metadata: Metadata = _Unpickler(file).load()
                _check(metadata)
            except OSError:
                raise
            except Exception as error:  # a damaged pickle may raise anything
                raise ValueError(f"{path}: not the description of a checkpoint: {error!r}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """A planner that unpickles an entry other than a tensor only if it is a plain value."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        try:
            torch.save(torch.load(value, weights_only=True), plain)  # what torch reads next is of our own making
        except Exception as error:
            raise ValueError(f"{read_item.dest_index.fqn}: the checkpoint holds no plain value: {error}") from error
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("the description of a checkpoint must not refer to objects outside the file")


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise TypeError(f"it is a {type(metadata).__name__}")
    if not isinstance(metadata.storage_data, dict):
        raise TypeError("it does not name the files of its tensors")
    for place in metadata.storage_data.values():
        if not isinstance(place, _StorageInfo):
            raise TypeError(f"the entry for a tensor's file is a {type(place).__name__}")
        name = place.relative_path
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in the folder")
        if type(place.offset) is not int or type(place.length) is not int or min(place.offset, place.length) < 0:
            raise ValueError(f"bytes {place.offset!r} to {place.length!r} of {name} are not a part of a file")

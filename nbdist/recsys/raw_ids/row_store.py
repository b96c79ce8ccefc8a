"""Memory for the rows of a table: the process's own, or files, for tables larger than memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import torch
from torch import Tensor

from .counted import grown


class RowStore:
    """The memory of a table's tensors, which have the same number of rows and grow together.

    In files, the operating system reads the pages of rows that are used, and keeps those used last in free memory. The
    files have no name: they end with the process. Disk space is reserved in advance, so that a full disk raises an
        error when the table grows.

    Args:
        folder: The folder of the files. None: the tensors are in the process's memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = folder
        self._files: dict[str, tuple[Any, int]] = {}
        """The file of each tensor, and the address at which it is mapped."""

    def grown(self, name: str, tensor: Tensor, rows: int, value: float = 0) -> Tensor:
        """Return a tensor with at least `rows` rows. Rows that are added are filled with `value`.

        Args:
            name: The name of the tensor. An earlier tensor of this name in a file is dropped, unless it is `tensor`
                itself.

        Raises:
            FileNotFoundError: There is no such folder.
            OSError: The disk is full.
            ValueError: The rows are in files, and `tensor` is on a GPU.
        """
        if self._folder is None:
            return grown(tensor, rows, value)
        if tensor.device.type != "cpu":
            raise ValueError(f"a table of raw ids with `folder` must be on the CPU, got {tensor.device}")
        file, address = self._files.get(name, (None, 0))
        same = file is not None and tensor.data_ptr() == address
        if same and len(tensor) >= rows:
            return tensor
        if not same:
            file = self._file()
        found = _mapped(file, max(rows, len(tensor)), tensor)
        if not same:
            found[: len(tensor)] = tensor
        if value:
            found[len(tensor) :] = value
        self._files[name] = file, found.data_ptr()
        return found

    def taken(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Return some rows of a tensor: in a file of their own, if the tensor is in one."""
        if self._folder is None or not len(rows):
            return tensor[rows]
        return torch.index_select(tensor, 0, rows, out=_mapped(self._file(), len(rows), tensor))

    def _file(self) -> Any:
        if not os.path.isdir(self._folder or ""):
            raise FileNotFoundError(f"`folder` must be a folder on this machine, got {os.fspath(self._folder or '')!r}")
        return tempfile.TemporaryFile(dir=self._folder)

    def __reduce__(self) -> Any:
        return RowStore, (self._folder,)  # a copy has other files


def _mapped(file: Any, rows: int, like: Tensor) -> Tensor:
    """Map rows of a file as a tensor, with the type and the columns of another tensor. New rows are zeros."""
    shape = (rows, *like.shape[1:])
    size = like.element_size() * torch.Size(shape).numel()
    if hasattr(os, "posix_fallocate"):  # otherwise a write to a full disk would end the process
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        os.truncate(file.fileno(), size)
    memory = mmap.mmap(file.fileno(), size)
    if hasattr(mmap, "MADV_RANDOM"):
        memory.madvise(mmap.MADV_RANDOM)  # rows next to each other are not used together
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)

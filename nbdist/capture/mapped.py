"""Data mapped from files: a rank maps the file again, and nothing is copied."""

from __future__ import annotations

import bisect
import functools
import mmap
import os
import socket
import sys
import warnings
from typing import Any, NamedTuple

from ..errors import NbdistError

#: Data of at least this many bytes are looked for among the mapped files; smaller ones are copied, unless they are of a
#: kind that is always mapped. A look takes a millisecond.
LEAST = 16 << 20

READ, WRITE, COPY = mmap.ACCESS_READ, mmap.ACCESS_WRITE, mmap.ACCESS_COPY
#: How names of files are read: they may be of any bytes.
_NAMES: Any = {"encoding": sys.getfilesystemencoding(), "errors": "surrogateescape"}
_MODES = {READ: "r", WRITE: "r+", COPY: "c"}


class FilePart(NamedTuple):
    """A part of a file: start and length in bytes, and the mode of the mapping."""

    path: str
    start: int
    size: int
    access: int

    def open(self) -> tuple[mmap.mmap, int]:
        """Map the part in this process. Returns the mapping, and the position of the part in it. Raises
        `NbdistError`."""
        before = self.start % mmap.ALLOCATIONGRANULARITY
        try:
            with open(self.path, "r+b" if self.access == WRITE else "rb") as file:
                if os.fstat(file.fileno()).st_size < self.start + self.size:
                    raise OSError("the file is shorter now")
                mapping = mmap.mmap(file.fileno(), before + self.size, access=self.access, offset=self.start - before)
        except OSError as exc:
            raise NbdistError(
                f"the notebook has mapped {self.path}, and this rank on {socket.gethostname()} cannot do so ({exc}): "
                f"ranks need the file at the same path, or else a copy of the data (`numpy.array(x)`, `tensor.clone()`)"
            ) from exc
        return mapping, before


class MappedFiles:
    """Finder of data of this process that are mapped from files. It asks the system at its first use; only Linux
    answers."""

    def find(self, address: int, size: int, named: bool = False) -> FilePart | None:
        """Return the part of a file that is mapped at this address, if the file can be opened again and is unchanged.

        /dev/shm contains files, and memory that libraries share only with their own processes. So writes to data in
        /dev/shm are shared only if the data are `named`: mapped by the name of their file.
        """
        index = bisect.bisect(self._maps, (address + 1,)) - 1
        if size <= 0 or index < 0 or address >= self._maps[index][1]:
            return None
        start, _, access, position, path = self._maps[index]
        end = address + size
        while (mapped_to := self._maps[index][1]) < end:  # one mapping may be listed in pieces
            index += 1
            if index == len(self._maps) or self._maps[index][::4] != (mapped_to, path):
                return None
        if not path.startswith("/") or not os.path.isfile(path):
            return None  # memory without a file, or one that is deleted or replaced
        if path.startswith("/dev/") and not (path.startswith("/dev/shm/") and (named or access == READ)):
            return None
        if access == COPY and _changed(start, end):
            return None
        return FilePart(path, position + address - start, size, access)

    @functools.cached_property
    def _maps(self) -> list[tuple[int, int, int, int, str]]:
        """Start, end, access, position in the file and path of each mapping, in the order of their addresses."""
        try:
            with open("/proc/self/maps", **_NAMES) as file:
                lines = [line.rstrip("\n").split(None, 5) for line in file]
        except OSError:
            return []
        found = []
        for span, allowed, position, _, _, *path in lines:
            start, end = (int(part, 16) for part in span.split("-"))
            access = READ if allowed[1] != "w" else WRITE if allowed[3] == "s" else COPY
            found.append((start, end, access, int(position, 16), _unescaped(path[0]) if path else ""))
        return found


def _unescaped(path: str) -> str:
    """Return a path as it is: the system writes a newline in it as `\\012`, and a backslash as itself."""
    return path if "\\012" not in path or os.path.exists(path) else path.replace("\\012", "\n")


def _changed(start: int, end: int) -> bool:
    """Return whether this process has written to its private mapping there, so that its data differ from the file's."""
    with open("/proc/self/smaps", **_NAMES) as file:
        inside = False
        for line in file:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                first, last = (int(part, 16) for part in name.split("-"))
                inside = first < end and last > start
            elif inside and name == "Anonymous:" and rest.split()[0] != "0":
                return True
    return False


def _warn_of_copy(what: str, nbytes: int, writes: bool = False) -> None:
    lost = ". What ranks write there stays in the ranks" if writes else ""
    warnings.warn(
        f"{what} of {nbytes / 1e9:.2f} GB is mapped from a file, but is sent as a copy in shared memory: ranks cannot "
        f"open that file again (it was deleted or replaced, or its pages were changed in this process alone){lost}",
        stacklevel=2,
    )


# ------------------------------------------------------------------------------------------------------ NumPy arrays


def reduce_array(array: Any, files: MappedFiles) -> tuple[Any, ...] | None:
    """Return the reduction of an array that is mapped from a file; None for any other array."""
    import numpy as np

    is_memmap = type(array) is np.memmap
    if array.size == 0 or array.dtype.hasobject or not (is_memmap or (array.nbytes >= LEAST and _borrows(array))):
        return None
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(min(step, 0) for step in steps)
    size = before + sum(max(step, 0) for step in steps) + array.itemsize
    part = files.find(array.ctypes.data - before, size, named=is_memmap)
    if part is None:
        writes = is_memmap and array.mode in ("r+", "w+")
        if is_memmap and (writes or array.nbytes >= LEAST) and _borrows(array):
            _warn_of_copy("an array", array.nbytes, writes)
        return None
    return _mapped_array, (part, is_memmap, array.dtype, array.shape, array.strides, before, array.flags.writeable)


def _borrows(array: Any) -> bool:
    """Return whether an array's memory belongs to an object that is not an array."""
    import numpy as np

    while isinstance(array, np.ndarray):
        array = array.base
    return array is not None


def _mapped_array(
    part: FilePart, is_memmap: bool, dtype: Any, shape: Any, strides: Any, offset: int, writeable: bool
) -> Any:
    import numpy as np

    mapping, begin = part.open()
    kind = np.memmap if is_memmap else np.ndarray
    array: Any = np.ndarray.__new__(kind, shape, dtype, mapping, begin + offset, strides)
    if is_memmap:
        array._mmap, array.filename = mapping, part.path
        array.offset, array.mode = part.start, _MODES[part.access]
    if not writeable:
        array.flags.writeable = False
    return array


# --------------------------------------------------------------------------------------- Arrow buffers, torch storages


def reduce_buffer(buffer: Any, files: MappedFiles) -> tuple[Any, ...] | None:
    """Return the reduction of a buffer of Arrow that is mapped from a file; None for any other buffer."""
    part = files.find(buffer.address, buffer.size) if buffer.is_cpu and buffer.size >= LEAST else None
    return None if part is None else (_mapped_buffer, (part,))


def _mapped_buffer(part: FilePart) -> Any:
    import pyarrow

    mapping, begin = part.open()
    return pyarrow.py_buffer(mapping).slice(begin, part.size)


def reduce_storage(untyped: Any, files: MappedFiles) -> tuple[Any, ...] | None:
    """Return the reduction of a storage of torch that is mapped from a file; None for any other storage."""
    if untyped.device.type != "cpu":
        return None
    named = getattr(untyped, "filename", None) is not None
    if not named and untyped.nbytes() < LEAST:
        return None
    part = files.find(untyped.data_ptr(), untyped.nbytes(), named)
    if part is None:
        if named and untyped.nbytes() >= LEAST:
            _warn_of_copy("a tensor", untyped.nbytes())
        return None
    return _mapped_storage, (part,)


def _mapped_storage(part: FilePart) -> Any:
    import torch

    if part.access == READ:  # a tensor knows no read-only memory
        part = part._replace(access=COPY)
    mapping, begin = part.open()
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=begin, count=part.size).untyped_storage()

"""Parquet files on this machine, on shared folders, and behind URIs: `s3://bucket/ratings`, `gs://`, `abfs://`.

Arrow has S3, Google Cloud Storage, Azure and HDFS; fsspec opens any other scheme that it knows, if it is installed.
These libraries find credentials in their own ways (AWS_PROFILE and so on). Options, such as an endpoint, are part of
the URI: `s3://bucket/ratings?endpoint_override=minio:9000&scheme=http`.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

#: Where a file is: a path, or a URI as text.
Location: TypeAlias = Path | str
#: What names files: a file, a folder, a glob pattern, a URI, or several of these.
Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def is_uri(name: str | os.PathLike[str]) -> bool:
    """Return whether a name is a URI; a `pathlib.Path` never is."""
    return isinstance(name, str) and "://" in name


class Found(NamedTuple):
    """A Parquet file, and the values of columns in the names of its folders."""

    location: Location
    partition: dict[str, str | None]
    """A mapping from columns to values, from folders with names like ``column=value``, which Hive, Spark, Arrow and
    polars write. None: null."""


def find(files: Paths) -> list[Location]:
    """Return the locations of `find_partitioned`."""
    return [found.location for found in find_partitioned(files)]


def find_partitioned(files: Paths) -> list[Found]:
    """Find the Parquet files of a file, a folder, a glob pattern, a URI, or several of these.

    A folder stands for its ``*.parquet`` files, or for the files in its subfolders with names like ``column=value``, at
    any depth. Files of a folder or pattern are sorted, so that every rank has the same order. Names of folders count as
    partitions below the folder in `files`, or below the part of a pattern without wildcards.

    Raises:
        FileNotFoundError: A file does not exist, or a folder has no Parquet file.
        TypeError: An argument is not the name of a file.
        ValueError: Neither Arrow nor fsspec can read a URI, or a folder has both files and partitions.
    """
    if not isinstance(files, (str, os.PathLike)):
        if not isinstance(files, Iterable) or isinstance(files, Mapping) or hasattr(type(files), "columns"):
            raise TypeError(f"files must be paths, URIs or glob patterns, got {type(files).__name__}")
        return [found for one in files for found in find_partitioned(one)]
    if is_uri(files):
        return [Found(uri, _partition(uri.partition("?")[0], base)) for uri, base in _find_remote(str(files))]
    path = Path(files).expanduser()
    if path.is_file():
        return [Found(path, {})]
    base = path
    if path.is_dir():
        found = [Path(one) for one in _in_folder(str(path), _list_local)]
    else:
        found = [Path(one) for one in sorted(glob.glob(str(path)))]
        parts = path.parts
        base = Path(*parts[: next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))])
        if base != path:  # folders, of such as "ratings/date=2024-01-*", mean what is in them
            inner = [_in_folder(str(one), _list_local) if one.is_dir() else [one] for one in found]
            found = [Path(file) for files in inner for file in files]
    if not found:
        raise FileNotFoundError(f"{files}: " + ("the folder has no *.parquet" if path.is_dir() else "no such file"))
    return [Found(one, _partition(str(one), str(base))) for one in found]


_PARTITION = re.compile(r"[^=]+=.*")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NULL = "__HIVE_DEFAULT_PARTITION__"


def _partition(file: str, base: str) -> dict[str, str | None]:
    """Read the names of the folders between `base` and a file in it."""
    folders = posixpath.dirname(file[len(base) :]).split("/")
    pairs = [folder.split("=", 1) for folder in folders if _PARTITION.fullmatch(folder)]
    unquoted = {urllib.parse.unquote(name): urllib.parse.unquote(value) for name, value in pairs}
    return {name: None if value == _NULL else value for name, value in unquoted.items()}


def partitions(files: Sequence[Found], columns: Container[str]) -> dict[str, list[int | str | None]]:
    """Return the columns in the names of folders, with the value for each file, except `columns`, which the files have.

    Values are integers if all of them are; otherwise strings.

    Raises:
        ValueError: Folders of different files name different columns.
    """
    first = files[0]
    for path, partition in files:
        if partition.keys() != first.partition.keys():
            raise ValueError(
                f"files must be in folders that name the same columns: {path} has {', '.join(partition) or 'none'}, "
                f"{first.location} has {', '.join(first.partition) or 'none'}"
            )
    found: dict[str, list[int | str | None]] = {}
    for name in [name for name in first.partition if name not in columns]:
        values = [one.partition[name] for one in files]
        whole = all(value is None or _INTEGER.fullmatch(value) for value in values) and any(values)
        found[name] = [int(value) if whole and value is not None else value for value in values]
    return found


def _list_local(folder: str) -> tuple[list[str], list[str]]:
    entries = list(os.scandir(folder))
    return [one.name for one in entries if one.is_file()], [one.name for one in entries if one.is_dir()]


def _in_folder(folder: str, entries: Callable[[str], tuple[list[str], list[str]]]) -> list[str]:
    """Return the ``*.parquet`` of a folder or, if it has none, of its partitions; sorted.

    Args:
        entries: A function that returns the names of the files and of the subfolders in a folder.
    """
    files, folders = entries(folder)
    found = sorted(name for name in files if fnmatch.fnmatchcase(name, "*.parquet"))
    partitions = sorted(name for name in folders if _PARTITION.fullmatch(name))
    if found and partitions:
        raise ValueError(f"{folder} has both files ({found[0]}) and partitions ({partitions[0]}): name one of the two")
    inner = [file for name in partitions for file in _in_folder(f"{folder}/{name}", entries)]
    return [f"{folder}/{name}" for name in found] + inner


def parquet(location: Location, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file, and read its footer unless it is given. Only the needed parts of a remote file are
    fetched."""
    if isinstance(location, Path):
        return pq.ParquetFile(location, metadata=footer)
    filesystem, path = resolve(location)
    return pq.ParquetFile(path, filesystem=filesystem, pre_buffer=True, metadata=footer)


def resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a URI, and the path on it."""
    scheme, _, rest = uri.partition("://")
    location, _, query = rest.partition("?")
    authority, slash, _ = location.partition("/")
    filesystem, root = _filesystem(f"{scheme}://{authority}{slash}" + (f"?{query}" if query else ""))
    return filesystem, root.rstrip("/") + location[len(authority) :]


@functools.lru_cache(maxsize=16)
def _filesystem(root: str) -> tuple[pafs.FileSystem, str]:
    try:
        filesystem, path = pafs.FileSystem.from_uri(root)
        return filesystem, str(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        try:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(root)
        except (ImportError, ValueError) as other:
            raise ValueError(f"{root}: neither Arrow ({error}) nor fsspec ({other}) can read from there") from None
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), str(path)


def _find_remote(uri: str) -> list[tuple[str, str]]:
    """Return the URI of each file, and the position in the URI where the names of its partitions begin."""
    address, mark, query = uri.partition("?")
    folder = address.rstrip("/")
    pattern = "*.parquet"
    if glob.has_magic(address):
        folder, _, pattern = address.rpartition("/")
        if glob.has_magic(folder):
            raise ValueError(f"{uri}: a pattern is possible only in the last part of a URI")
    filesystem, path = resolve(folder + mark + query)
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.File:
        return [(folder + mark + query, folder)]

    def entries(folder: str) -> tuple[list[str], list[str]]:
        there = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
        both = {kind: [one.base_name for one in there if one.type == kind] for kind in pafs.FileType}
        return both[pafs.FileType.File], both[pafs.FileType.Directory]

    if pattern == "*.parquet":
        found = [file[len(path) + 1 :] for file in _in_folder(path, entries)]
    else:
        found = sorted(name for name in entries(path)[0] if fnmatch.fnmatchcase(name, pattern))
    if not found:
        raise FileNotFoundError(f"{uri}: no such file, and no folder with {pattern}")
    return [(f"{folder}/{name}{mark}{query}", folder) for name in found]

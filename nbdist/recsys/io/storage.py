"""Parquet files on this machine, on shared folders, and wherever a URI leads: `s3://bucket/ratings`, `gs://`, `abfs://`.

Arrow has S3, Google Cloud Storage, Azure and HDFS; any other scheme goes to fsspec, if that is installed and knows it.
Credentials are found as those libraries find them (AWS_PROFILE and so on); options such as an endpoint of one's own go
with the URI: `s3://bucket/ratings?endpoint_override=minio:9000&scheme=http`.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

#: Where a file is: a path, or a URI as text.
Location: TypeAlias = Path | str
#: What names files: a file, a folder, a glob pattern, a URI, or several of these.
Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def is_uri(name: str | os.PathLike[str]) -> bool:
    """Whether a name is a URI; a `pathlib.Path` never is."""
    return isinstance(name, str) and "://" in name


def find(files: Paths) -> list[Location]:
    """The Parquet files meant by a file, a folder (its ``*.parquet``), a glob pattern, a URI, or several of these.

    What comes from a folder or pattern is sorted, so that every rank has the same order.

    Raises:
        FileNotFoundError: for what does not exist or holds no Parquet file.
        ValueError: for a URI that neither Arrow nor fsspec can read.
    """
    if not isinstance(files, (str, os.PathLike)):
        return [location for one in files for location in find(one)]
    if is_uri(files):
        return list(_find_remote(str(files)))
    path = Path(files).expanduser()
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.parquet")) if path.is_dir() else [Path(one) for one in sorted(glob.glob(str(path)))]
    if not found:
        raise FileNotFoundError(f"{files}: " + ("the folder has no *.parquet" if path.is_dir() else "no such file"))
    return list(found)


def parquet(location: Location, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file; reads its footer unless that is given. Of a remote one, what is asked for is fetched."""
    if isinstance(location, Path):
        return pq.ParquetFile(location)
    filesystem, path = resolve(location)
    return pq.ParquetFile(path, filesystem=filesystem, pre_buffer=True, metadata=footer)


def resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a URI, and the path there."""
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


def _find_remote(uri: str) -> list[str]:
    address, mark, query = uri.partition("?")
    folder = address.rstrip("/")
    pattern = "*.parquet"
    if glob.has_magic(address):
        folder, _, pattern = address.rpartition("/")
        if glob.has_magic(folder):
            raise ValueError(f"{uri}: a pattern for the last part of a URI only")
    filesystem, path = resolve(folder + mark + query)
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.File:
        return [folder + mark + query]
    entries = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
    names = [entry.base_name for entry in entries if entry.type == pafs.FileType.File]
    found = sorted(name for name in names if fnmatch.fnmatchcase(name, pattern))
    if not found:
        raise FileNotFoundError(f"{uri}: no such file, and no folder with {pattern}")
    return [f"{folder}/{name}{mark}{query}" for name in found]

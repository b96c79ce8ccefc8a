"""A log that grows: new Parquet files of a folder, each once it is complete."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ...checks import check_number


def follow(
    folder: str | os.PathLike[str],
    *,
    after: Collection[str | os.PathLike[str]] = (),
    poll_seconds: float = 1.0,
    timeout: float | None = None,
) -> Iterator[Path]:
    """Yield the Parquet files of a folder, and then new files as they appear, each once, when it is complete.

    A file is complete when its footer can be read, because the footer is written last. Files that are complete at the
    same time come in the order of their names. Names that begin with "." or "_" are ignored, as in other programs.

    Args:
        folder: The folder. It need not exist yet.
        after: Files to leave out, by name or path, such as files that the model has already learned from.
        poll_seconds: The number of seconds between two looks at the folder.
        timeout: The iteration ends after this number of seconds without a new file. None: it never ends.

    Raises:
        TypeError, ValueError: `poll_seconds` is not a number above 0, or `timeout` is below 0.
        NotADirectoryError: `folder` is a file.

    Examples:
        >>> import polars as pl
        >>> from pathlib import Path
        >>> from nbdist.recsys.days import follow
        >>> Path("log").mkdir()
        >>> for day in ("monday", "tuesday"):
        ...     pl.DataFrame({"user": [1, 2]}).write_parquet(f"log/{day}.parquet")
        >>> [file.name for file in follow("log", after=["monday.parquet"], timeout=0)]
        ['tuesday.parquet']
    """
    check_number(poll_seconds, above=0, name="`poll_seconds`")
    if timeout is not None:
        check_number(timeout, name="`timeout`")
    path = Path(folder).expanduser()
    if path.is_file():
        raise NotADirectoryError(f"`folder` must be a folder of Parquet files, got the file {path}")
    return _new_files(path, {Path(one).name for one in after}, poll_seconds, timeout)


def _new_files(folder: Path, seen: set[str], poll_seconds: float, timeout: float | None) -> Iterator[Path]:
    since = time.monotonic()
    while True:
        names = sorted(one.name for one in folder.glob("*.parquet") if one.name[0] not in "._")
        for name in names:
            if name not in seen and _complete(folder / name):
                seen.add(name)
                yield folder / name
                since = time.monotonic()
        if timeout is not None and time.monotonic() - since >= timeout:
            return
        time.sleep(poll_seconds if timeout is None else min(poll_seconds, timeout))


def _complete(file: Path) -> bool:
    try:
        pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError):  # it is being written, or was taken away
        return False
    return True

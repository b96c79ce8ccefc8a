"""Folders that appear with all their files in them, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from .. import ranks
from . import storage
from .disk import exchange, sync


@contextlib.contextmanager
def atomic_folder(folder: str | os.PathLike[str], replaceable: Sequence[str], overwrite: bool) -> Iterator[Path]:
    """Yield a scratch folder. At the end, its subfolder ``whole`` becomes `folder`, in one step.

    The scratch folder is hidden, next to `folder`, and is removed at the end of the block in any case. If the process
    is killed it stays, under another name than `folder`, until the next call for the same `folder` removes it.

    A replaced folder exists until its successor does. If the file system cannot exchange two folders (NFS), a process
    that is killed between two renames can leave neither. Then the next call for the same `folder` restores the old one
    first.

    On several ranks, all ranks must call it. They wait for each other before `folder` appears.

    Args:
        folder: The folder to make. It must not exist yet, or be empty, unless `overwrite` is true.
        replaceable: Patterns of file names. A folder with any other file in it is not replaced.
        overwrite: Whether to replace an existing folder.

    Raises:
        FileExistsError: The folder exists and may not be replaced. Raised on all ranks, before anything is written.
        ValueError: `folder` is a URI.
    """
    if storage.is_uri(folder):
        raise ValueError(
            f"{folder}: object stores cannot rename a folder; name a folder on a disk that all ranks can reach"
        )
    target = Path(folder).expanduser().absolute()
    scratch = target.with_name(f".{target.name}.partial")
    lock = -1

    def begin() -> None:
        nonlocal lock
        lock = _claim(scratch, target)
        _check(target, replaceable, overwrite)

    try:
        ranks.on_rank_0(begin)
        yield scratch
        ranks.barrier()
        ranks.on_rank_0(lambda: _publish(scratch, target))
    finally:
        if lock >= 0:  # on rank 0 alone: a rank that fails must not take the ground from under the others
            _recover(scratch, target)
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)


def _check(target: Path, replaceable: Sequence[str], overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} must be a folder or not exist, got a file")
    names = sorted(os.listdir(target))
    if names and not overwrite:
        raise FileExistsError(f"{target} already exists: choose another folder, or give overwrite=True")
    for name in names:
        if not any(fnmatch(name, pattern) for pattern in replaceable):
            raise FileExistsError(f"{target} holds {name}, which is no {' or '.join(replaceable)}: it is not replaced")


def _claim(scratch: Path, target: Path) -> int:
    """Make the scratch folder, for this process alone, empty except for ``whole``. Returns its lock, a descriptor."""
    scratch.mkdir(parents=True, exist_ok=True)
    lock = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock of a process that was killed is gone with it
        _recover(scratch, target)
        for left in scratch.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        (scratch / "whole").mkdir()
    except BlockingIOError:
        os.close(lock)
        raise FileExistsError(f"{target} is being written by another process, in {scratch}") from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _publish(scratch: Path, target: Path) -> None:
    for path in [*(scratch / "whole").iterdir(), scratch / "whole"]:
        sync(path)
    if not target.exists():
        (scratch / "whole").rename(target)
    elif not exchange(scratch / "whole", target):
        target.rename(scratch / "old")
        (scratch / "whole").rename(target)
    sync(target.parent)


def _recover(scratch: Path, target: Path) -> None:
    """Restore the folder that was moved away for a successor that did not come."""
    if (scratch / "old").exists() and not target.exists():
        (scratch / "old").rename(target)

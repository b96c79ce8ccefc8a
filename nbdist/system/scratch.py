"""Temporary folders that do not outlive the processes that use them, even if all of these are killed.

A folder is held: a process that uses it, and the forks of this process, have a descriptor with a lock (`flock`) on it.
A folder that no process holds is removed by the next fork server of the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import zlib

from .private import make_folder

#: A temporary folder may be on a file system that other machines use, too, and on which locks hold for one machine.
_MACHINE = f"{zlib.crc32(os.uname().nodename.encode()):08x}"
_NAME = re.compile(rf"nbdist-(output-)?{_MACHINE}[0-9a-f]{{8}}")


def new_name(kind: str = "") -> str:
    """Return a new name for a folder of a kind: "" or "output-"."""
    return f"nbdist-{kind}{_MACHINE}{secrets.token_hex(4)}"


def make_held(folder: str) -> int:
    """Make a folder with mode 0700 and a name of `new_name`; return the descriptor that holds it until it is closed.

    Raises `OSError`, such as `FileExistsError`.
    """
    unheld = folder + "~"  # another process may look for abandoned folders right now
    make_folder(unheld)
    held = -1
    try:
        held = os.open(unheld, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: no process removes the folder there, either
            fcntl.flock(held, fcntl.LOCK_SH)
        os.rename(unheld, folder)
    except BaseException:
        os.rmdir(unheld)
        if held >= 0:
            os.close(held)
        raise
    return held


def remove_abandoned(place: str) -> None:
    """Remove this user's folders in `place` that no process of this machine holds any more."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # a process holds it, or removes it, or there are no locks
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)

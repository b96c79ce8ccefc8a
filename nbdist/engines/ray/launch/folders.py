"""The folders of a Ray on this machine: for its sockets and logs, and for the objects in its store.

Ray puts paths into command lines without quotes, so that a space breaks them. It binds Unix sockets below its temporary
folder, and their names have at most 107 bytes. It keeps objects in /dev/shm without a check that files can be made
there.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from typing import Any

#: How the name of a Ray's folder begins, what is appended to it, at its longest, and what follows the process id.
_PREFIX = "ray-"
_SESSION, _SOCKET = "/s/session_2026-11-27_16-37-37_684201_", "/sockets/plasma_store"
#: Bytes of a Unix socket's name.
_LONGEST = 107
#: Free bytes that the files of a Ray need.
_ROOM = 32 << 20
#: Where a folder of its own is made if the temporary folder cannot be used.
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
SHARED_MEMORY = "/dev/shm"
#: Bytes of Ray's store of objects where it cannot have as much as Ray takes by default.
_STORE = 200 << 20
#: Smallest store that Ray takes.
_SMALLEST_STORE = 80 << 20


def temporary_folder() -> str:
    """Make a folder for the files of a Ray; only this user can read it.

    It is in Ray's own place or, if Ray cannot use that place, elsewhere.

    Raises `OSError` if there is no usable folder, or if `RAY_TMPDIR` names one that Ray cannot use.
    """
    chosen = os.environ.get("RAY_TMPDIR")
    found: list[str] = []
    for place in (chosen,) if chosen else (os.environ.get("TMPDIR") or "/tmp", *_OTHERS):
        wrong = unusable(place)
        if not wrong:
            return tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        found.append(f"{place!r} {wrong}")
    if chosen:
        raise OSError(f"RAY_TMPDIR must be a folder that Ray can use, got {chosen!r}, which {wrong}")
    raise OSError(f"there is no folder for Ray's files: {', '.join(found)}. Set RAY_TMPDIR to one that Ray can use")


def sessions(folder: str) -> str:
    """Return the folder for Ray's sessions, a new one inside `folder`: Ray lets all users write to its folder."""
    return os.path.join(folder, "s")


def unusable(place: str) -> str:
    """Return why Ray cannot keep its sessions in a folder that is made in `place`; "" if it can."""
    length = len(os.fsencode(f"{place}/{_PREFIX}12345678{_SESSION}{os.getpid()}{_SOCKET}"))
    if length > _LONGEST:
        return f"is {length - _LONGEST} bytes too long for the names of Ray's sockets"
    if any(sign.isspace() for sign in place):
        return "has a space in its name, at which Ray's command lines end"
    if not os.path.isdir(place):
        return "is no folder"
    return _not_writable(place) or _full(place, _ROOM)


def store(folder: str) -> dict[str, Any]:
    """Return parameters of a Ray node for its object store, which is in `folder` if shared memory is too small.

    If the address space is limited, the store is small: Ray maps all of it.
    """
    parameters: dict[str, Any] = {}
    if _not_writable(SHARED_MEMORY) or _full(SHARED_MEMORY, _STORE):
        parameters = {"plasma_directory": folder, "object_store_memory": _STORE}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        parameters["object_store_memory"] = max(_SMALLEST_STORE, min(_STORE, limit // 16))
    return parameters


def _not_writable(place: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=place):  # a system mounted read-only lets root do nothing, either
            return ""
    except OSError as exc:
        return f"takes no files ({exc.strerror})"


def _full(place: str, room: int) -> str:
    free = shutil.disk_usage(place).free
    return f"has {free / 1e6:.1f} MB left, and Ray needs {room / 1e6:.0f}" if free < room else ""

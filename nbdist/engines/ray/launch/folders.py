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

#: What Ray appends to the folder of all its sessions, at its longest, and what follows the process id.
_SESSION, _SOCKET = "/session_2026-11-27_16-37-37_684201_", "/sockets/plasma_store"
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


def temporary_folder() -> tuple[str, bool]:
    """Return the folder for Ray's sessions, and whether it was made for this Ray because Ray's own choice cannot be
    used.

    Raises `OSError` if there is no usable folder, or if `RAY_TMPDIR` names one that Ray cannot use.
    """
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    first = os.path.join(place, "ray")
    wrong = unusable(place, first)
    if not wrong:
        return first, False
    if os.environ.get("RAY_TMPDIR"):
        raise OSError(f"RAY_TMPDIR must be a folder that Ray can use, got {place!r}, which {wrong}")
    found = [f"{place!r} {wrong}"]
    for other in _OTHERS:
        wrong = unusable(other, f"{other}/ray-12345678")
        if not wrong:
            return tempfile.mkdtemp(prefix="ray-", dir=other), True
        found.append(f"{other!r} {wrong}")
    raise OSError(f"there is no folder for Ray's files: {', '.join(found)}. Set RAY_TMPDIR to one that Ray can use")


def unusable(place: str, sessions: str) -> str:
    """Return why Ray cannot keep its sessions in `sessions`, a folder in `place` or made there; "" if it can."""
    length = len(os.fsencode(f"{sessions}{_SESSION}{os.getpid()}{_SOCKET}"))
    if length > _LONGEST:
        return f"is {length - _LONGEST} bytes too long for the names of Ray's sockets"
    if any(sign.isspace() for sign in place):
        return "has a space in its name, at which Ray's command lines end"
    if not os.path.isdir(place):
        return "is no folder"
    return _not_writable(sessions if os.path.isdir(sessions) else place) or _full(place, _ROOM)


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

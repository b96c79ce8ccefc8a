"""Folders, files and Unix sockets that only processes of the same user can use."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_LOCAL_PEERCRED, _XUCRED = 1, struct.Struct("II")  # of macOS: version, uid
#: Bytes that the path of a socket may have.
_LONGEST = 100


def make_folder(folder: str) -> None:
    """Make a folder with mode 0700. Raises `FileExistsError`."""
    os.mkdir(folder, 0o700)
    os.chmod(folder, 0o700)  # a umask may have taken the user's own permissions away


def make_private(folder: str) -> None:
    """Make a folder, and its parents, with mode 0700.

    Raises:
        PermissionError: The folder exists, and other users can open it or own it.
    """
    _make_with_parents(folder)
    check_private(folder)


def _make_with_parents(folder: str) -> None:
    if not os.path.isdir(folder):
        _make_with_parents(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            make_folder(folder)


def check_private(folder: str) -> None:
    """Raise `PermissionError` unless a folder belongs to this user and no other user can access it."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} must be a folder, not a link")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} must belong to user {os.geteuid()}, got user {found.st_uid}")
    if found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must have mode 0700, got {stat.S_IMODE(found.st_mode):04o}: chmod 700 {folder}"
        )


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """Yield a path of a socket that is short enough for the system."""
    if len(os.fsencode(path)) <= _LONGEST or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def listen(path: str) -> socket.socket:
    """Return a listening socket at a path in a private folder."""
    listening = socket.socket(socket.AF_UNIX)
    with _short(path) as short:
        listening.bind(short)
    os.chmod(path, 0o600)
    listening.listen(64)
    return listening


def connect(path: str) -> socket.socket:
    """Return a connection to the process that listens at a path.

    Raises:
        PermissionError: The process belongs to another user.
        OSError: No process listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as short:
            connection.connect(short)
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> None:
    """Raise `PermissionError` unless the other end of a Unix socket is a process of the same user."""
    uid = _peer(connection)
    if uid != os.geteuid():
        raise PermissionError(f"the other end must be a process of user {os.geteuid()}, got user {uid}")


def _peer(connection: socket.socket) -> int:
    if sys.platform == "darwin":
        return int(_XUCRED.unpack(connection.getsockopt(0, _LOCAL_PEERCRED, 76)[: _XUCRED.size])[1])
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])

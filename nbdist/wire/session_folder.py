"""The folder of a named session: its path, and its files other than the journal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from typing import Any

import nbdist

from ..checks import shown
from ..system.private import check_private, make_folder, make_private

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: Any) -> str:
    """Return `name`. Raises `TypeError` or `ValueError` unless it can be the name of a session."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {shown(name)}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name must be up to 64 letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}"
        )
    return name


def base() -> str:
    """Return the folder of all sessions of this user."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(os.path.abspath(state), "nbdist", "sessions")


def names() -> list[str]:
    """Return the names of all sessions that have a folder.

    Raises:
        PermissionError: Other users can access the folder of all sessions.
    """
    if not os.path.isdir(base()):
        return []
    check_private(base())
    return sorted(name for name in os.listdir(base()) if _NAME.fullmatch(name))


class SessionFolder:
    """The folder of the session with this name; it may not exist.

    Args:
        name: A name that `check_name` accepts.
    """

    def __init__(self, name: str) -> None:
        self.name = check_name(name)
        self.path = os.path.join(base(), name)
        self.socket = os.path.join(self.path, "socket")

    def make(self) -> None:
        """Make the folder. Raises `FileExistsError` if it exists."""
        make_private(base())
        make_folder(self.path)

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def check(self) -> None:
        """Raise `PermissionError` if another user can access the folder."""
        check_private(base())
        check_private(self.path)

    def lock(self) -> int:
        """Mark the folder as belonging to a living keeper, which is this process, until its end. Returns a
        descriptor."""
        fd = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def alive(self) -> bool:
        """Return whether the session's keeper lives."""
        try:
            fd = os.open(os.path.join(self.path, "lock"), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def describe(self, about: Mapping[str, Any]) -> None:
        """Write the description of the session for processes that attach, with the pid of this process."""
        own: dict[str, Any] = {
            "name": self.name,
            "nbdist": nbdist.__version__,
            "python": _python(),
            "executable": sys.executable,
        }
        own |= {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot()}
        fd = os.open(os.path.join(self.path, "session.json"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w") as file:
            json.dump({**own, **about}, file)

    def about(self) -> dict[str, Any]:
        """Return the description that `describe` has written; empty if it is missing or incomplete."""
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.path, "session.json")) as file:
            found: dict[str, Any] = json.load(file)
            return found
        return {}

    def elsewhere(self) -> str:
        """Return the name of the keeper's machine; empty if it is this machine."""
        host = str(self.about().get("host", ""))
        return "" if host == socket.gethostname() else host

    def restarted(self) -> bool:
        """Return whether the machine has been restarted since the keeper was started."""
        return bool(self.about().get("boot", _boot()) != _boot())

    def other_version(self) -> str:
        """Return the versions of the keeper as a text, if this process has others; otherwise an empty text."""
        about = self.about()
        if not about or (about["nbdist"], about["python"]) == (nbdist.__version__, _python()):
            return ""
        return f"nbdist {about['nbdist']} on Python {about['python']} ({about['executable']})"

    def remove(self) -> None:
        """Remove the folder with all its files."""
        shutil.rmtree(self.path, ignore_errors=True)


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _boot() -> str:
    """Return a text that changes at each start of the machine; empty if the system has none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""

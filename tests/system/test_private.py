"""Folders and sockets that only processes of the same user can use, also on a machine with other users."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from users import OTHER, as_another_user, needs_root

from nbdist.system import private
from nbdist.wire.session_folder import SessionFolder


def test_a_private_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "a" / "b")
    private.make_private(folder)
    private.make_private(folder)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.chmod(folder, 0o750)
    with pytest.raises(PermissionError, match=r"must have mode 0700, got 0750: chmod 700 "):
        private.check_private(folder)


def test_a_link_is_no_private_folder(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "own", 0o700)
    os.symlink(tmp_path / "own", tmp_path / "link")
    with pytest.raises(PermissionError, match="must be a folder, not a link"):
        private.make_private(str(tmp_path / "link"))


@needs_root
def test_another_users_folder(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "other", 0o700)
    os.chown(tmp_path / "other", OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"must belong to user 0, got user {OTHER}"):
        private.check_private(str(tmp_path / "other"))


@pytest.mark.parametrize("depth", [1, 40])
def test_a_socket(tmp_path: Path, depth: int) -> None:
    """Also at a path that is too long for one."""
    folder = tmp_path.joinpath(*["folder"] * depth)
    folder.mkdir(parents=True)
    path = str(folder / "socket")
    with contextlib.closing(private.listen(path)) as listening:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with contextlib.closing(private.connect(path)) as ours:
            theirs, _ = listening.accept()
            private.check_peer(theirs)
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
            theirs.close()


def test_the_user_of_the_other_end_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        private.check_peer(one)
        own = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: own + 1)
        with pytest.raises(PermissionError, match=f"must be a process of user {own + 1}, got user {own}"):
            private.check_peer(one)


def connected(path: str) -> str:
    """Connect to a socket as another user; the name of the exception, if one is raised."""
    return as_another_user(lambda: socket.socket(socket.AF_UNIX).connect(path))


@needs_root
def test_another_user_does_not_get_in() -> None:
    """Neither through the folder nor, where that is open, through the socket; and not where both are open."""
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        folder, path = os.path.join(base, "own"), os.path.join(base, "own", "socket")
        os.mkdir(folder, 0o700)
        with contextlib.closing(private.listen(path)) as listening:
            assert connected(path) == "PermissionError"
            os.chmod(folder, 0o777)
            assert connected(path) == "PermissionError", "the socket has a mode of its own"
            os.chmod(path, 0o777)
            assert connected(path) == "None"
            connection, _ = listening.accept()
            with contextlib.closing(connection), pytest.raises(PermissionError, match=f"got user {OTHER}"):
                private.check_peer(connection)


@needs_root
def test_a_umask_takes_no_permission_from_the_user_of_a_named_session() -> None:
    def make() -> str:
        os.umask(0o777)
        os.environ["XDG_STATE_HOME"] = os.path.join(base, "state")
        folder = SessionFolder("named")
        folder.make()
        folder.check()
        return ",".join(f"{os.stat(os.path.join(base, path)).st_mode & 0o777:o}" for path in made)

    made = ("state", "state/nbdist", "state/nbdist/sessions", "state/nbdist/sessions/named")
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o777)
        assert as_another_user(make) == "700,700,700,700"

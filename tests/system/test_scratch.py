"""Temporary folders of processes that were killed: the next process removes them, and none that is in use."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from users import OTHER, as_another_user, needs_root

from nbdist.system import scratch


def forked(work: Callable[[], None]) -> tuple[int, int]:
    """Do something in a fork, which then waits: its pid, and a pipe that ends with it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            work()
            os.write(write, b".")
            signal.pause()
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"."
    return pid, read


def kill(pid: int, pipe: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)


@pytest.mark.parametrize("kind", ["", "output-"])
def test_a_folder_is_removed_once_all_that_hold_it_are_killed(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / scratch.new_name(kind)
    children: list[tuple[int, int]] = []

    def server() -> None:
        scratch.make_held(str(folder))
        (folder / "17").mkdir()
        (folder / "17" / "listener").touch()

    maker = forked(server)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    children.append(forked(lambda: None))  # as a rank: it holds what its server does
    os.close(held)
    scratch.remove_abandoned(str(tmp_path))
    assert (folder / "17" / "listener").exists()
    kill(*maker)
    scratch.remove_abandoned(str(tmp_path))
    assert folder.exists()
    kill(*children[0])
    scratch.remove_abandoned(str(tmp_path))
    assert not folder.exists()


def test_others_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of other programs and machines stay, and a folder that is being made."""
    for name in ("nbdist-mine", f"{scratch.new_name()}~", "nbdist-output-0000000012345678"):
        (tmp_path / name).mkdir()
    (tmp_path / scratch.new_name()).symlink_to(tmp_path / "nbdist-mine")
    (tmp_path / scratch.new_name()).touch()
    before = sorted(os.listdir(tmp_path))
    scratch.remove_abandoned(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == before
    scratch.remove_abandoned(str(tmp_path / "missing"))


@needs_root
def test_another_users_folder_stays(tmp_path: Path) -> None:
    folder = tmp_path / scratch.new_name()
    folder.mkdir(0o700)
    os.chown(folder, OTHER, OTHER)
    scratch.remove_abandoned(str(tmp_path))
    assert folder.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = tmp_path / scratch.new_name()
    os.close(scratch.make_held(str(folder)))
    scratch.remove_abandoned(str(tmp_path))
    assert folder.exists()


def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / scratch.new_name()
    (folder / "17").mkdir(parents=True)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(OSError):
        scratch.make_held(str(folder))
    assert os.listdir(tmp_path) == [folder.name]
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors


def test_sessions_that_start_at_once_remove_no_folder_of_each_other(tmp_path: Path) -> None:
    made: list[str] = []
    done = threading.Event()

    def remove() -> None:
        while not done.is_set():
            scratch.remove_abandoned(str(tmp_path))

    thread = threading.Thread(target=remove)
    thread.start()
    held = []
    try:
        for _ in range(300):
            made.append(str(tmp_path / scratch.new_name()))
            held.append(scratch.make_held(made[-1]))
    finally:
        done.set()
        thread.join()
        for descriptor in held:
            os.close(descriptor)
    assert all(os.path.isdir(folder) for folder in made)


@needs_root
def test_a_umask_takes_no_permission_from_the_user_who_makes_a_folder() -> None:
    def make() -> str:
        os.umask(0o777)
        folder = os.path.join(base, scratch.new_name())
        os.close(scratch.make_held(folder))
        return f"{os.stat(folder).st_mode & 0o777:o}"

    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o777)
        assert as_another_user(make) == "700"

"""The folders of a Ray of this machine: another one is used where Ray could not use its own choice."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import poll

from nbdist.engines.ray.launch import folders
from nbdist.wire.channel import Channel


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short name, as the only place for others."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(folders, "_OTHERS", ("/missing", "/tmp"))
    place = Path("/tmp") / f"short{os.getpid()}"
    place.mkdir()
    yield place
    shutil.rmtree(place)


def test_a_folder_that_ray_can_use_is_its_choice(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    found = folders.temporary_folder()
    assert os.path.dirname(found) == str(short) and os.stat(found).st_mode & 0o777 == 0o700
    assert os.path.dirname(folders.sessions(found)) == found


@pytest.mark.parametrize("name", ["with space", "tab\t", "x" * 60, "missing/folder", "file"])
def test_a_folder_that_ray_cannot_use_is_replaced(short: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = short / name
    if name == "file":
        place.touch()
    elif "missing" not in name:
        place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    found = folders.temporary_folder()
    assert os.path.dirname(found) == "/tmp" and os.stat(found).st_mode & 0o777 == 0o700
    os.rmdir(found)
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    with pytest.raises(OSError, match="RAY_TMPDIR must be a folder that Ray can use, got"):
        folders.temporary_folder()


def test_a_full_disk_names_each_folder(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda place: SimpleNamespace(free=5_000_000))
    monkeypatch.setenv("TMPDIR", str(short))
    with pytest.raises(OSError, match=r"short\d+' has 5.0 MB left.*'/missing' is no folder.*'/tmp' has 5.*RAY_TMPDIR"):
        folders.temporary_folder()


def test_objects_are_kept_elsewhere_without_shared_memory(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_full", lambda place, room: "")
    assert "plasma_directory" not in folders.store("/x")
    monkeypatch.setattr(folders, "SHARED_MEMORY", str(short / "missing"))
    assert folders.store("/x")["plasma_directory"] == "/x"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2 << 30, 2 << 30))
    assert folders.store("/x")["object_store_memory"] == 128 << 20


#: One call on a Ray of this machine, in a script; its value or error goes to the file that is named.
CALL = """
import sys, nbdist
file = open(sys.argv[1], "w")
try:
    print(nbdist.in_ddp.options(engine=nbdist.RayOptions(cpus=0.2))(2, lambda: 5), file=file, flush=True)
except BaseException as exc:
    print(repr(exc), file=file, flush=True)
"""


@pytest.mark.long("starts a Ray of its own")
def test_a_local_ray_starts_with_an_unusual_path_without_descriptors_and_with_limits(short: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    place = short / "with späce"
    place.mkdir()
    unusual = 'exec 0<&- 1>&- 2>&-; ulimit -v 8000000; ulimit -s 1024; exec "$@"'
    command = ["/bin/bash", "-c", unusual, "bash", sys.executable, "-c", CALL, str(short / "value")]
    subprocess.run(command, env={**os.environ, "TMPDIR": str(place)}, check=True)
    assert (short / "value").read_text() == "5\n"
    assert poll(lambda: not list(place.iterdir()))


#: Writes whether Ray's folder is its user's alone, and which of Ray's processes others than this machine reach.
OPEN = """
import glob, os, sys, nbdist, psutil, stat
session = nbdist.Session(2, engine=nbdist.RayOptions(cpus=0.2))
session.run(int)
found = []
for process in psutil.Process().children(recursive=True):
    listening = process.net_connections() if hasattr(process, "net_connections") else process.connections()
    ips = [one.laddr.ip.removeprefix("::ffff:") for one in listening if one.status == "LISTEN"]
    found += [(process.name(), ip) for ip in ips if ip not in ("127.0.0.1", "::1")]
own, = glob.glob(os.path.join(os.environ["TMPDIR"], "ray-*"))
open(sys.argv[1], "w").write(repr((stat.S_IMODE(os.stat(own).st_mode) == 0o700, found)))

def uses_ray():
    import ray
    ray.init(log_to_driver=False)
    return ray.get(ray.put(5))

assert session.run(uses_ray) == 5
"""


@pytest.mark.long("starts a Ray of its own")
def test_a_ray_of_this_machine_is_reached_by_its_user_alone(short: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    environ = {**os.environ, "TMPDIR": str(short)}
    subprocess.run([sys.executable, "-c", OPEN, str(short / "found")], env=environ, check=True)
    assert (short / "found").read_text() == "(True, [])"
    assert poll(lambda: not list(short.glob("ray-*")))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="without pidfd nothing reports the end of the notebook")
@pytest.mark.parametrize("killed", [True, False])
def test_the_driver_removes_the_folders_of_a_notebook_that_was_killed(tmp_path: Path, killed: bool) -> None:
    from nbdist.engines.ray.driver.main import Driver

    folder = tmp_path / "of the notebook"
    folder.mkdir()
    with subprocess.Popen(["sleep", "1000"]) as notebook:
        ours, theirs = socket.socketpair()
        kernel = os.pidfd_open(notebook.pid)
        try:
            with theirs:
                driver = Driver(Channel(theirs), kernel, None)  # type: ignore[arg-type]
                with ours:
                    Channel(ours).send(("folder", 0, str(folder)))
                if killed:
                    notebook.kill()
                asyncio.run(driver.serve())
                driver.remove_folders()
            assert folder.exists() is not killed
        finally:
            os.close(kernel)
            notebook.kill()

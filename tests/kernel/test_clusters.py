"""`nbdist.cluster`: Ray starts on machines, is used, and ends with the notebook; what is missing there is said early.

All machines are this one. What reaches them as srun is a stand-in, which runs as many tasks as there are nodes, with
one input for all of them, as Slurm's does. By ssh it is an sshd of the test's own, with a key and a port of its own,
where one is installed; and a stand-in for ssh where none is. Where root may make network namespaces, hosts have
addresses of their own, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from cells import cells
from conftest import Kernel, living, poll
from machines import SSHD, make_keys, namespaces, processes_on, ssh_options, sshd, why_not

import nbdist
from nbdist import NbdistError, Session, engines

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")

SMALL = ["--object-store-memory=100000000", "--num-cpus=2", "--include-log-monitor=false"]

PROGRAMS = cells("kernel/cells/clusters.py")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for srun on the path. Returns the file in which its options are."""
    asked = tmp_path / "asked"
    program(tmp_path / "bin" / "srun", f"#!{sys.executable}\nasked = {str(asked)!r}\n{PROGRAMS['srun']}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return asked


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Options with which ssh reaches 127.0.0.1 and localhost."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        program(tmp_path / "bin" / "ssh", f"#!{sys.executable}\n{PROGRAMS['ssh']}")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        yield []
        return
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    make_keys(tmp_path)
    with sshd(tmp_path, "127.0.0.1", port):
        yield ssh_options(tmp_path, port)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Two of them: address → name."""
    if reason := why_not():
        pytest.skip(reason)
    with namespaces(tmp_path, 2) as found:
        yield found


def of_ray(parent: int) -> list[psutil.Process]:
    """Return the processes of Ray that a process has started, in whatever session."""
    found = []
    for one in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.name() in ("raylet", "gcs_server", "srun", "ssh"):
                found.append(one)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(of_ray(os.getpid()))  # of the cluster that other tests share
    yield
    assert set(of_ray(os.getpid())) <= before


def folders() -> set[str]:
    return {name for name in os.listdir("/tmp") if name.startswith("ray-")}


@pytest.mark.long("clusters of Ray")
def test_hosts_with_addresses_of_their_own_one_of_which_is_taken_away(
    machines: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def address() -> str:
        dist.all_reduce(torch.ones(1))
        return str(psutil.net_if_addrs()["eth0"][0].address)

    def told() -> bool:
        while not nbdist.preempted():
            time.sleep(0.1)
        return True

    hosts = list(machines)
    about: dict[str, Any] = {"options": ssh_options(tmp_path, 22), "ray_start": SMALL, "linger": 0.0}
    with nbdist.cluster(hosts, placement="strict_spread", **about), Session(2) as session:
        seen = session.run_all(address)
        assert sorted(seen) == sorted(hosts)
        waiting = session.submit(told)
        [ray_start] = [one for one in processes_on(machines[seen[1]]) if "ray.scripts.scripts" in one.cmdline()]
        ray_start.terminate()  # as a machine does that is about to go
        assert waiting.result()
        assert f"({socket.gethostname()}, {seen[1]}) will be taken away" in capsys.readouterr().err
    assert not any(map(processes_on, machines.values()))


@pytest.mark.long("clusters of Ray")
def test_ray_on_two_hosts_is_used_and_ends(ssh: list[str]) -> None:
    before = folders()
    arguments: dict[str, Any] = {"options": ssh, "ray_start": SMALL, "placement": "strict_spread", "linger": 0.0}
    with nbdist.cluster(["127.0.0.1", "localhost"], **arguments) as own:
        assert nbdist.cluster(["127.0.0.1", "localhost"], **arguments) is own, "the same cell again"
        with Session(2) as session:
            assert session.run_all(lambda: os.environ["NODE_RANK"]) == ["0", "1"]
        assert "running" in repr(own)
        assert all(os.stat(f"/tmp/{name}").st_mode & 0o777 == 0o700 for name in folders() - before)
    assert engines.in_use() == "local" and "closed" in repr(own)
    assert poll(lambda: not folders() - before)  # other tests have clusters, too


@pytest.mark.long("clusters of Ray")
def test_ray_on_slurms_nodes_ends_with_the_notebook(srun: Path, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, env={"PATH": os.environ["PATH"]})
    started: list[psutil.Process] = []
    before = folders()
    try:
        kernel.ok("import nbdist\nfrom nbdist import in_ddp")
        options = f"nodes=2, gpus=0, options=['--time=1:00:00'], ray_start={SMALL}, placement='strict_spread'"
        said = kernel.ok(f"own = nbdist.cluster('slurm', {options})").text
        assert "Ray runs on 0 of 2 machines" in said
        assert srun.read_text() == "--nodes=2 --ntasks=2 --ntasks-per-node=1 --unbuffered --time=1:00:00"
        assert kernel.ok("in_ddp(2, __import__('torch').distributed.get_world_size)").text.endswith("2\n")
        started = psutil.Process(kernel.pid).children(recursive=True)
        assert sum(one.name() == "raylet" for one in started) == 2
        os.kill(kernel.pid, signal.SIGKILL)
        assert poll(lambda: not living(started)), living(started)
        assert poll(lambda: not folders() - before)
    finally:
        kernel.close()
        for one in living(started):
            one.kill()


@pytest.mark.long("clusters of Ray")
def test_nothing_of_ssh_outlives_a_notebook_that_is_killed(ssh: list[str], tmp_path: Path) -> None:
    """Nor does the connection that forwards a port, which has nothing to do with a machine's program."""
    kernel = Kernel(tmp_path, env={"PATH": os.environ["PATH"]})
    started: list[psutil.Process] = []
    try:
        kernel.ok(f"import nbdist\nown = nbdist.cluster(['127.0.0.1'], options={ssh}, ray_start={SMALL})")
        started = psutil.Process(kernel.pid).children(recursive=True)
        assert any("-L" in one.cmdline() for one in living(started)), "the forwarded port"
        os.kill(kernel.pid, signal.SIGKILL)
        assert poll(lambda: not living(started)), living(started)
    finally:
        kernel.close()
        for one in living(started):
            one.kill()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"where": "k8s"}, "must be 'slurm' or a list of hosts, got 'k8s'"),
        ({"where": []}, "a list of hosts"),
        ({"where": ["a", "a"]}, "'a' is there twice"),
        ({"where": ["-oProxyCommand=x"]}, "is no host"),
        ({"where": ["a"], "nodes": 2}, 'nodes=2 is for "slurm"'),
        ({"where": "slurm"}, "nodes must be the number"),
        ({"where": "slurm", "nodes": 0}, "nodes must be at least 1, got 0"),
        ({"where": ["a"], "gpus": -1}, "gpus must be at least 0, got -1"),
        ({"where": ["a"], "placement": "anywhere"}, "placement must be one of .* got 'anywhere'"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nbdist.cluster(**arguments)


@needs_ray
@pytest.mark.parametrize(("where", "program"), [("slurm", "srun"), (["host1"], "ssh")])
def test_without_the_program_that_starts_it(
    where: Any, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NbdistError, match=f"there is no {program} on this machine"):
        nbdist.cluster(where, nodes=2 if where == "slurm" else None)


@needs_ray
@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client, which is to say what it cannot reach")
def test_a_host_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(NbdistError, match=r"(?s)127.0.0.1 cannot be reached: .*refused.*`ssh 127.0.0.1 true`"):
        nbdist.cluster(["127.0.0.1"], options=["-p", str(port)])


@needs_ray
def test_a_host_with_another_version_of_ray_is_refused(srun: Path, tmp_path: Path) -> None:
    (tmp_path / "there" / "ray-9.9.9.dist-info").mkdir(parents=True)
    (tmp_path / "there" / "ray-9.9.9.dist-info" / "METADATA").write_text("Name: ray\nVersion: 9.9.9\n")
    program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path / "there"} exec {sys.executable} "$@"\n')
    with pytest.raises(NbdistError, match=r"cannot run Ray: ray is 9.9.9 there \(.*\), and \d"):
        nbdist.cluster("slurm", nodes=2, python=str(tmp_path / "python"))


@needs_ray
def test_a_host_without_the_interpreter(ssh: list[str]) -> None:
    with pytest.raises(NbdistError, match=r"127.0.0.1 does not find its Python: .*/no/python.*Give python="):
        nbdist.cluster(["127.0.0.1"], options=ssh, python="/no/python")


@pytest.mark.long("clusters of Ray")
def test_too_long_a_time(srun: Path, tmp_path: Path) -> None:
    words = "srun: job 7 queued and waiting for resources"
    program(tmp_path / "python", f"#!/bin/sh\necho '{words}' >&2\nexec cat >/dev/null\n")
    with pytest.raises(NbdistError, match=r"Ray runs on 0 of 2 machines after 1 s\. slurm: srun: job 7 queued"):
        nbdist.cluster("slurm", nodes=2, python=str(tmp_path / "python"), wait=1.0)


@pytest.mark.long("clusters of Ray")
def test_ray_that_does_not_start(srun: Path) -> None:
    with pytest.raises(NbdistError, match=r"(?s)cannot run Ray: .*[Nn]o such option.*--nonsense"):
        nbdist.cluster("slurm", nodes=1, ray_start=["--nonsense"])

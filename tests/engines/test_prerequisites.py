"""Systems on which ranks cannot run: the error says why, before a process starts."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys

import pytest

from nbdist import NbdistError
from nbdist.engines import prerequisites

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what Linux alone has")


def test_this_system() -> None:
    prerequisites.check_proc()
    prerequisites.check_loopback()


def test_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "readlink", missing)
    with pytest.raises(NbdistError, match=r"^/proc must be mounted, got .*: mount -t proc proc /proc$"):
        prerequisites.check_proc()


def test_the_proc_of_another_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: "4711")
    with pytest.raises(NbdistError, match=r"must show the processes of this PID namespace, got process 4711 for"):
        prerequisites.check_proc()


def test_a_question_about_interfaces_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> bytes:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    prerequisites.check_loopback()


def test_a_loopback_interface_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with IPv6 alone."""

    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(prerequisites.socket, "socket", type("Socket", (socket.socket,), {"bind": refuse}))
    with pytest.raises(NbdistError, match=r"must have the address 127.0.0.1, .*: ip addr add 127.0.0.1/8 dev lo$"):
        prerequisites.check_loopback()


CODE = """
from nbdist import NbdistError
from nbdist.engines import prerequisites
try:
    prerequisites.check_{}()
except NbdistError as exc:
    print(exc)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"]).returncode != 0,
    reason="needs root, to make a namespace",
)
@pytest.mark.parametrize(
    "namespace, check, said",
    [("-n", "loopback", "'lo' must be up, because"), ("-pf", "proc", "got process "), ("-pf --mount-proc", "proc", "")],
)
def test_a_real_namespace(namespace: str, check: str, said: str) -> None:
    command = ["unshare", *namespace.split(), sys.executable, "-c", CODE.format(check)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert said in printed and bool(printed) == bool(said)

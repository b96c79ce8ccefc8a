"""Machines for tests and benchmarks: network namespaces of this one, with addresses and an sshd of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
from conftest import poll

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


def make_keys(folder: Path) -> None:
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)


def ssh_options(folder: Path, port: int) -> list[str]:
    known = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}"]
    return ["-p", str(port), "-i", str(folder / "user"), "-l", getpass.getuser(), *known]


@contextlib.contextmanager
def sshd(folder: Path, address: str, port: int, *inside: str) -> Iterator[None]:
    """A server that takes the key in `folder`; `inside` is what starts it somewhere else."""
    config = {
        "Port": port,
        "ListenAddress": address,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",  # pytest's folders are others' to write to
        "UsePAM": "no",
        "PidFile": "none",
    }
    arguments = [part for name, value in config.items() for part in ("-o", f"{name}={value}")]
    log = folder / f"log-{address}"
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where root's server separates its privileges
    server = subprocess.Popen([*inside, str(SSHD), "-D", "-E", log, "-f", "/dev/null", *arguments])
    try:
        assert poll(lambda: not socket.socket().connect_ex((address, port))), log.read_text()
        yield
    finally:
        server.terminate()
        server.wait()


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if SSHD is None or os.geteuid() != 0 or shutil.which("ip") is None:
        return "namespaces as machines take root, iproute2 and sshd"
    done = subprocess.run(["ip", "link", "add", "nbtry", "type", "bridge"], capture_output=True, text=True)
    if done.returncode:
        return f"no bridge can be made here: {done.stderr.strip()}"
    ip("link", "del", "nbtry")
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(folder: Path, count: int, rate: str = "") -> Iterator[dict[str, str]]:
    """Machines that reach each other and are reached from here, each with an sshd at port 22: address → name.

    Args:
        folder: For keys and logs.
        count: How many.
        rate: To what `tc` limits each one's traffic, to it and from it, such as "400mbit".
    """
    number = os.getpid() % 250
    bridge, shape = f"nb{number}", ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "100ms")
    make_keys(folder)
    with contextlib.ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"10.213.{number}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        found = {}
        for host in range(1, count + 1):
            name, address = f"nb{number}-{host}", f"10.213.{number}.{host}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(ip, "link", "del", name)  # the namespace's own end would do so later
            ip("link", "set", name, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            if rate:
                subprocess.run(["tc", "qdisc", "add", "dev", name, *shape], check=True)
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
            stack.enter_context(sshd(folder, address, 22, "ip", "netns", "exec", name))
            found[address] = name
        yield found


def processes_on(machine: str) -> list[psutil.Process]:
    pids = subprocess.run(["ip", "netns", "pids", machine], check=True, capture_output=True, text=True).stdout.split()
    return [one for one in map(psutil.Process, map(int, pids)) if one.name() != "sshd"]

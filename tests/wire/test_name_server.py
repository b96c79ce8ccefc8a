"""Ranks meet without a name server: it may be slow, drop questions, or be away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: In namespaces of its own there is a name server that counts the questions and answers none; ranks join there as those
#: of several machines do. Exit code 77: this machine lets nobody make namespaces.
SCRIPT = """
import ctypes, fcntl, os, socket, struct, sys, tempfile, time
from nbdist.rank.world import Membership
from nbdist.wire.messages import Slot, World
from nbdist.wire.rendezvous import Rendezvous

RANKS, (NEW_MOUNTS, NEW_USER, NEW_NETWORK), BIND = 16, (0x20000, 0x10000000, 0x40000000), 4096
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NETWORK):
    sys.exit(77)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # the loopback interface, up and running
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 0x41))
with tempfile.NamedTemporaryFile("w") as file:
    file.write("nameserver 127.0.0.1\\noptions timeout:1 attempts:1\\n")
    file.flush()
    if libc.mount(file.name.encode(), b"/etc/resolv.conf", None, BIND, None):
        sys.exit(77)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
server.setblocking(False)

def questions():
    count = 0
    while True:
        try:
            server.recv(1 << 16)
        except BlockingIOError:
            return count
        count += 1

def meet(rank, rendezvous):
    import torch
    import torch.distributed as dist

    world = World(rank, RANKS, "cpu", "gloo", Slot(0, rank, RANKS, "lo", 1, ()), rendezvous.address, threads=1)
    Membership().join(world, list(map(os.dup, rendezvous.fds(rank))))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == RANKS

import torch.distributed

rendezvous, ranks, begin = Rendezvous("127.0.0.1"), [], time.monotonic()
for rank in range(RANKS):
    ranks.append(os.fork())
    if not ranks[-1]:
        meet(rank, rendezvous)
        os._exit(0)
statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
print(statuses == [0] * RANKS, questions(), round(time.monotonic() - begin, 1))

try:  # what ranks ask for themselves still reaches the name server
    rendezvous = Rendezvous("127.0.0.1")
    RANKS = 1
    meet(0, rendezvous)
    socket.getaddrinfo("some.where", 80)
except socket.gaierror:
    pass
print(questions() > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux' own")
def test_no_rank_asks_a_name_server(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent.parent)
    ran = subprocess.run([sys.executable, str(script)], env={"PYTHONPATH": root}, capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("this machine lets nobody make namespaces")
    assert ran.returncode == 0, ran.stderr
    joined, asked = ran.stdout.splitlines()
    assert joined.split()[:2] == ["True", "0"], ran.stdout + ran.stderr
    assert asked == "True"

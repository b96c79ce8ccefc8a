"""The script of test_name_server.py."""

# %% ranks with a name server
import ctypes
import fcntl
import os
import socket
import struct
import sys
import tempfile

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
    file.write("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
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


import torch.distributed  # noqa: F401

rendezvous, ranks = Rendezvous("127.0.0.1"), []
for rank in range(RANKS):
    ranks.append(os.fork())
    if not ranks[-1]:
        meet(rank, rendezvous)
        os._exit(0)
statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
print(statuses == [0] * RANKS, questions())

try:  # what ranks ask for themselves still reaches the name server
    rendezvous = Rendezvous("127.0.0.1")
    RANKS = 1
    meet(0, rendezvous)
    socket.getaddrinfo("some.where", 80)
except socket.gaierror:
    pass
print(questions() > 0)

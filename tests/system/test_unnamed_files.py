"""Memory without a name in sandboxes that refuse `memfd_create`."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist
from conftest import open_fds

from nbdist.system.segments import Segment
from nbdist.wire.rendezvous import Rendezvous, open_store


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_sandbox_without_memfd(number: int, shared_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    if not shared_memory:
        monkeypatch.setattr("nbdist.system.segments._SHARED", "/missing")
    before = open_fds()
    segment = Segment.create(3 << 20)
    segment.write(memoryview(b"x" * (3 << 20)), 0)
    assert segment.holds(memoryview(b"xxx"), (3 << 20) - 3) and not os.get_inheritable(segment.fd)
    segment.close()
    rendezvous = Rendezvous()
    try:
        ours, theirs = (open_store(rank, 2, rendezvous.address, rendezvous.fds(rank)) for rank in (0, 1))
        ours.set("key", "value")
        assert theirs.get("key") == b"value" and isinstance(ours, dist.FileStore)
        del ours, theirs
    finally:
        rendezvous.close()
    assert open_fds() == before


IN_SMALL_SHARED_MEMORY = """
import os
from nbdist.system.segments import Segment
def refuse(name, flags=0):
    raise PermissionError(1, "refused")
os.memfd_create = refuse
Segment.create(16 << 10).close()
try:
    Segment.create(40_000_000, "the data")
except MemoryError as exc:
    print(exc)
print(os.statvfs("/dev/shm").f_bavail * 4096)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to mount a /dev/shm")
def test_shared_memory_of_two_megabytes_names_itself() -> None:
    shell = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "/bin/sh", "-c", shell, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this system lets its users make no mounts of their own")
    done = subprocess.run([*command, sys.executable, "-c", IN_SMALL_SHARED_MEMORY], capture_output=True, text=True)
    said = "the data: 40 MB of memory are needed, and 2 MB are free of the 2 MB of /dev/shm."
    assert done.stdout.startswith(said) and done.stdout.endswith(f"\n{2 << 20}\n"), done

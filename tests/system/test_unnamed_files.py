"""Memory without a name in sandboxes that refuse `memfd_create`."""

from __future__ import annotations

import errno
import os

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

"""NCCL's process groups of several versions of torch, which are imitated: ranks in tests have no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nbdist.rank import nccl
from nbdist.rank.world import environ
from nbdist.wire.messages import Slot, World
from nbdist.wire.rendezvous import RendezvousAddress


class Backend:
    """The NCCL backend of a process group."""

    def __init__(self, error: str = "SUCCESS") -> None:
        self.error, self.aborted = error, 0

    def abort(self) -> None:
        self.aborted += 1

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend of the group "NCCL"; others have none."""
    made = Backend()
    monkeypatch.setattr(nccl, "backend_of", lambda group: made if group == "NCCL" else None)
    monkeypatch.setenv("RANK", "3")
    return made


def test_groups_of_torch_before_2_7_abort_by_their_backend(backend: Backend) -> None:
    """Their `ProcessGroup` has no `abort`."""
    nccl.abort("NCCL")
    nccl.abort("gloo")
    assert backend.aborted == 1


def test_an_error_in_any_group_is_raised(backend: Backend) -> None:
    nccl.check(["gloo", "NCCL"])
    backend.error = "TIMEOUT"
    with pytest.raises(dist.DistBackendError, match=r"^rank 3: a collective took longer than its timeout"):
        nccl.check(["gloo", "NCCL"])
    nccl.check(["gloo"])


def test_a_torch_that_cannot_be_asked_for_errors_keeps_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = RendezvousAddress("127.0.0.1", 1, 0)
    world = World(0, 2, "cuda:0", "nccl", Slot(0, 0, 2, "lo", 1, ()), rendezvous, 1)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in nccl.environ(world)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", object, raising=False)
    assert nccl.environ(world) == {}


def test_each_rank_on_a_shared_gpu_counts_as_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec puts the shards of a rank on `cuda:{LOCAL_RANK}`."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("NCCL_NET", "IB")
    rendezvous = RendezvousAddress("127.0.0.1", 1, 0)
    found = [
        environ(World(rank, 2, "cuda:0", "nccl", Slot(0, rank, 2, "lo", 1, ()), rendezvous, 1, shares_gpu=True))
        for rank in range(2)
    ]
    assert [one["NCCL_HOSTID"] for one in found] == ["nbdist-0", "nbdist-1"]
    assert [(one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"], one["NODE_RANK"]) for one in found] == [
        ("0", "1", "0"),
        ("0", "1", "1"),
    ]
    assert {one["NCCL_NET"] for one in found} == {"IB"}

"""Process groups that the function makes itself: they meet, last as long as any rank needs them, and are not reached
from the network."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbdist import Session, in_ddp


def open_to_others() -> list[str]:
    """Addresses at which this process listens and which are not of the loopback interface."""
    process = psutil.Process()
    found = process.net_connections("tcp") if hasattr(process, "net_connections") else process.connections("tcp")
    return [one.laddr.ip for one in found if one.status == "LISTEN" and one.laddr.ip not in ("127.0.0.1", "::1")]


def remade() -> list[str]:
    """Make a group again, as scripts for torchrun do."""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()
    return open_to_others()


def remade_as_in_tutorials() -> list[str]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.destroy_process_group()
    for root in range(size):  # in turn, so that another rank is through first
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
        dist.init_process_group("gloo", rank=rank, world_size=size)
        values = torch.full((2_000_000,), float(rank))
        dist.broadcast(values, root)
        assert values[-1] == root
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=size)
    return open_to_others()


def free_ports(count: int) -> list[int]:
    """Free ports below the range that the system takes for connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def in_halves(ports: list[int]) -> list[str]:
    rank = int(os.environ["RANK"])
    dist.destroy_process_group()
    address = f"tcp://127.0.0.1:{ports[rank // 2]}"
    dist.init_process_group("gloo", init_method=address, rank=rank % 2, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    return open_to_others()


def by_remote_calls() -> list[str]:
    import torch.distributed.rpc as rpc

    rank = dist.get_rank()
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync(f"w{1 - rank}", torch.add, args=(torch.ones(1), 1)) == 2
    found = open_to_others()
    rpc.shutdown()
    return found


def by_hand() -> list[str]:
    """Make stores as scripts do: by position and by name, by any name of this machine, one in the place of another."""
    rank, found, port = dist.get_rank(), [], [0]
    for host in ("localhost", "127.0.0.1", "127.0.0.2"):
        if rank == 0:
            store = dist.TCPStore(host, 0, 2, True, timedelta(seconds=60), False)
            port = [store.port]
        dist.broadcast_object_list(port)
        if rank == 1:
            store = dist.TCPStore(host_name=host, port=port[0], world_size=2, is_master=False)
        store.set(f"rank {rank}", "here")
        store.wait([f"rank {1 - rank}"])
        prefixed = dist.PrefixStore("own", store)
        assert prefixed.add("count", 1) in (1, 2) and isinstance(store, dist.TCPStore)
        found += open_to_others()
        dist.barrier()
        if rank == 0:
            dist.TCPStore("localhost", port=0, is_master=True, use_libuv=False, wait_for_workers=False).set("a", "b")
            one = dist.TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
            two = dist.TCPStore(host, one.port, is_master=True, multi_tenant=True, wait_for_workers=False)
            one.set("key", "value")
            assert two.get("key") == b"value"
            found += open_to_others()
    return [ip for ip in found if ip != "127.0.0.2"]


@pytest.mark.parametrize("fn", [remade, remade_as_in_tutorials, by_remote_calls, by_hand])
def test_groups_of_the_functions_own(fn: Any) -> None:
    with Session(2, timeout=120) as session:
        for _ in range(4):
            assert session.run_all(fn) == [[], []]


def test_groups_of_some_ranks_listen_on_loopback() -> None:
    with Session(4, timeout=120) as session:
        assert session.run_all(in_halves, free_ports(2)) == [[], [], [], []]


def test_a_group_of_the_functions_own_in_the_notebook() -> None:
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    before = rendezvous._create_c10d_store, dist.destroy_process_group, distributed_c10d.destroy_process_group
    assert in_ddp(0, remade) == []
    assert in_ddp(0, remade) == []
    assert before == (
        rendezvous._create_c10d_store,
        dist.destroy_process_group,
        distributed_c10d.destroy_process_group,
    )


def test_after_a_failure_groups_meet_again() -> None:
    def one_fails() -> None:
        dist.destroy_process_group()
        if os.environ["RANK"] == "1":
            raise KeyError("no group")
        dist.init_process_group("gloo")

    with Session(2, timeout=120) as session:
        with pytest.raises(KeyError, match="no group"):
            session.run(one_fails)
        assert session.run_all(remade) == [[], []]


@pytest.mark.parametrize("ending", [True, False])
def test_after_an_interrupt_in_torch_groups_meet_again(ending: bool) -> None:
    """A call that fails on one rank interrupts the others wherever they are: here, before torch has forgotten a group
    that it ends, or has made a new one the default group."""

    def interrupted() -> None:
        module: Any = distributed_c10d
        update = module._update_default_pg

        def stop(group: Any) -> None:
            module._update_default_pg = update
            if ending:
                update(group)
            raise KeyError("interrupted")

        if not ending:
            dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            module._update_default_pg = stop
        if ending:
            dist.destroy_process_group()
        else:
            dist.init_process_group("gloo")

    with Session(2, timeout=120) as session:
        for _ in range(2):
            with pytest.raises(KeyError, match="interrupted"):
                session.run(interrupted)
            assert session.run_all(remade) == [[], []]


def test_after_a_group_that_only_one_rank_asked_for_the_ranks_meet_again() -> None:
    def one_waits() -> None:
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            with pytest.raises(RuntimeError, match="Wait timeout"):
                dist.init_process_group("gloo", timeout=timedelta(seconds=1))

    with Session(2, timeout=60) as session:
        session.run(one_waits)
        assert session.run_all(remade) == [[], []]


@pytest.mark.long("40 sessions")
def test_groups_that_are_made_again_always_meet() -> None:
    for _ in range(40):
        with Session(2, timeout=120) as session:
            for _ in range(4):
                assert session.run_all(remade) == [[], []]

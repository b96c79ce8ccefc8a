"""Output of a rank that enters its process group: warnings that help, and no others."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist import Session
from nbdist.rank.world import gloo_announces, without_notice

NOTICE = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


def test_gloos_notices_of_connections_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with without_notice():
        os.write(1, b"[Gloo] is mine\n" + NOTICE + b"another thread")
        os.write(1, b" goes on\n")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\n[Gloo] is mine\nanother thread goes on\nafter\n"


def test_standard_output_that_is_closed_stays_so() -> None:
    own = os.dup(1)
    os.close(1)
    try:
        with without_notice():
            pass
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(1)
    finally:
        os.dup2(own, 1)
        os.close(own)


def test_versions_of_torch_whose_gloo_prints() -> None:
    versions = ["2.5.0", "2.7.1", "2.8.0+cpu", "2.10.0", "2.11.0+cu128", "2.13.0+cpu"]
    assert [gloo_announces(version) for version in versions] == [False, True, True, True, False, False]


def exhaust() -> None:
    total = torch.ones(1)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        files: list[Any] = []
        files.append(files)  # only the garbage collector can free them
        while True:
            files.append(open(os.devnull))  # noqa: SIM115
    dist.all_reduce(total)


def test_descriptors_that_wait_for_the_garbage_collector() -> None:
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with pytest.raises(OSError, match="Too many open files"):
            session.run(exhaust)
        assert session.run_all(os.getpid) == pids

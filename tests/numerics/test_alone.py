"""Collectives raise while a step is run again on one rank, and are torch's own afterwards."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nbdist.numerics.alone import alone


def test_collectives_raise_inside_and_work_afterwards() -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    whole = dist.ProcessGroup(dist.HashStore(), 0, 1)
    whole._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, group)
    before = dict(vars(dist.ProcessGroup))
    with alone(), pytest.raises(RuntimeError, match="cannot be run again on one rank alone"):
        whole.allreduce([torch.ones(1)])
    assert dict(vars(dist.ProcessGroup)) == before
    total = torch.ones(3)
    whole.allreduce([total]).wait()
    whole.barrier().wait()
    assert total.tolist() == [1.0] * 3

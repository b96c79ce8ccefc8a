"""Definitions of the notebooks of test_side_by_side.py."""

# %% steady
import os

import torch
import torch.distributed as dist

from nbdist import Session


def sums():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), os.getpid()


session = Session(2)
first = session.run(sums)


def steady(calls):
    assert {session.run(sums) for _ in range(calls)} == {first}


# %% in trouble
import contextlib
import os
import signal
import time

from nbdist import RankDied, RankTimeout, Session, in_ddp


def trouble():
    for fault, raised in (
        (lambda: 1 / 0, ZeroDivisionError),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RankDied),
        (lambda: os._exit(3), RankDied),
    ):
        try:
            in_ddp(2, fault)
        except raised:
            pass
        else:
            raise AssertionError(raised)
    with Session(2, timeout=0.2) as session, contextlib.suppress(RankTimeout):
        session.run(time.sleep, 1000)

"""Tests of users, which test_pytest_plugin.py writes to files, those that use the fixtures below `common`."""

# %% common
import os

import torch
import torch.distributed as dist


def sums():
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def remember():
    import __main__

    __main__.calls = getattr(__main__, "calls", 0) + 1
    return __main__.calls, os.getpid()


def fails():
    print("words of rank", dist.get_rank())
    sums()
    assert dist.get_rank() == 0, "not on this one"
    sums()


# %% calls share nothing
def test_fresh_ranks(ddp):
    first, second = ddp(2, remember), ddp(2, remember)
    assert first[0] == second[0] == 1 and first[1] != second[1]


def test_arguments(ddp):
    assert ddp(2, pow, 2, exp=3) == 8
    assert ddp(1, lambda: value + 1, need={"value": 2.5}) == 3.5


# %% a module shares its ranks
pids = []


def test_first(ddp_module):
    assert ddp_module(2, remember)[0] == 1
    assert ddp_module(3, sums) == 3.0


def test_second(ddp_module):
    calls, pid = ddp_module(2, remember)
    pids.append(pid)
    assert calls == 2


def test_third(ddp_module):
    ddp_module(2, fails)


def test_fourth(ddp_module):
    calls, pid = ddp_module(2, remember)
    assert calls == 1 and pid not in pids


def test_killed(ddp_module):
    ddp_module(2, os._exit, 9)


def test_last(ddp_module):
    assert ddp_module(2, remember)[0] == 1


# %% nothing heavy is imported
import sys


def test_light():
    assert not {"torch", "IPython"} & set(sys.modules)

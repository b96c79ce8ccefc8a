"""The script of test_many_ranks.py."""

# %% limited
import resource
import sys

import torch
import torch.distributed as dist

from nbdist import NbdistError, Session


def sums():
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    return total.item()


def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


with Session(4) as session:
    print(session.run(sums), session.run(soft), soft())
with Session(int(sys.argv[1])) as session:
    try:
        print(session.run(sums), session.run(soft), soft())
    except NbdistError as error:
        print(type(error).__name__, error)

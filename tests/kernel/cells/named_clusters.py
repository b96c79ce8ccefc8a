"""Cells of test_named_clusters.py."""

# %% training
import os
import pathlib
import time

import torch
import torch.distributed as dist

import nbdist
from nbdist import RayOptions, Session


def train(steps, folder):
    total = torch.zeros(1)
    for step in range(steps):
        part = torch.full((1,), float(step))
        dist.all_reduce(part)
        total += part
        print("rank", dist.get_rank(), "step", step)
        pathlib.Path(folder, f"step-{step}").touch()
        while step == 2 and not pathlib.Path(folder, "goes on").exists():
            time.sleep(0.05)
    return total.item(), os.environ.get("OF_THE_NOTEBOOK"), os.getcwd()


# %% a private Ray
os.environ["OF_THE_NOTEBOOK"] = "yes"
session = Session(2, name="private", engine=RayOptions(cpus=0.5))
session.run_all(train, 6, os.getcwd())

# %% nodes of Slurm
own = nbdist.cluster("slurm", nodes=2, ray_start=SMALL, placement="strict_spread", linger=0.0)
session = Session(2, name="slurm")
session.run_all(train, 6, os.getcwd())

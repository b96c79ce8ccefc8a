"""Cells of the pictures in the documentation. A picture shows the cell `NAME`, which comes after `before NAME`."""

# %% before failure
import torch
import torch.distributed as dist

from nbdist import in_ddp

rates = [0.1, 0.01, 0.0]


# %% failure
def train(epochs):
    for epoch in range(epochs):
        print("epoch", epoch)
        if dist.get_rank() == 1:
            print(1 / rates[epoch])
        dist.barrier()


in_ddp(2, train, 3)

# %% before tabs
import torch.distributed as dist

from nbdist import Session

# %% tabs
session = Session(2, output="tabs")


def train():
    for epoch in range(3):
        print(f"epoch {epoch}: loss {1 / (1 + epoch + dist.get_rank()):.3f}")


session.run(train)

# %% before status
import time

from nbdist import Session

session = Session(2)


def train(seconds):
    print("epoch 3: loss 0.127")
    time.sleep(seconds)


# %% status
future = session.submit(train, 60)
session.status()

# %% before collectives
import time

import torch
import torch.distributed as dist

from nbdist import Session

session = Session(2, devices="cpu")


def train():
    for step in range(12):
        time.sleep(0.03 if dist.get_rank() == step % 2 else 0.06)
        dist.all_reduce(torch.ones(200_000))
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), src=0)
    dist.all_reduce(torch.ones(1))


session.run(dist.get_rank)
future = session.submit(train)
while min(map(len, session.collectives().by_rank.values()), default=0) < 13:
    time.sleep(0.1)
time.sleep(0.2)

# %% collectives
session.collectives()

# %% before profile
import time

import torch
import torch.distributed as dist

from nbdist import Session


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(0.05 if dist.get_rank() == 0 else 0)
        return torch.ones(256)


def train():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


session = Session(2)

# %% profile
session.profile(train, skip=2, steps=5)

# %% before training
import torch

from nbdist import in_ddp
from nbdist.recsys.datasets import synthetic_ratings
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.models import DLRM
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit

ratings = synthetic_ratings(500, 200, 40_000).frame
users, movies = (torch.from_numpy(ratings[name].to_numpy().copy()).long() for name in ("user", "movie"))
rows = {"user": users, "movie": movies, "liked": (torch.from_numpy(ratings["rating"].to_numpy().copy()) > 3).float()}
train_rows = {name: column[:36_000] for name, column in rows.items()}
valid_rows = {name: column[36_000:] for name, column in rows.items()}


def predict(model, batch):
    return model(batch), batch["liked"]


# %% training
def train(steps):
    model = DLRM({"user": 501, "movie": 201}, embedding_dim=16)
    model = replicate(model, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))
    loader = MemoryLoader(train_rows, 256, shuffle=True, seed=1)
    return fit(model, predict, loader, MemoryLoader(valid_rows, 1024), steps=steps, log_every=20)


history = in_ddp(2, train, 120)

# %% before plan
import torch

from nbdist import in_ddp
from nbdist.recsys.models import DLRM
from nbdist.recsys.sharding import shard


# %% plan
def plan():
    sizes = {"user": 200_000, "movie": 60_000, "genre": 40, "day": 7}
    model = DLRM(sizes, embedding_dim=32, device="meta")
    strategies = {"user": "row_wise", "genre": "data_parallel"}
    return shard(model, strategies, batch_size=512, dense_optimizer=torch.optim.Adam).plan


in_ddp(2, plan)

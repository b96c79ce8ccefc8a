"""The click model that several parts train: rows on the GPU, two tables, a tower."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nbdist import rank_device

#: Users and movies of MovieLens 25M.
SIZES = (162_541, 59_047)


def rows(count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Columns user, movie (int32) and liked (uint8), shape (count,), on `device`; most are of few users and movies."""
    draw = torch.Generator().manual_seed(0)
    user, movie = ((torch.rand(count, generator=draw) ** 2 * size).int() for size in SIZES)
    return {
        "user": user.to(device),
        "movie": movie.to(device),
        "liked": ((user + movie) % 2).to(torch.uint8).to(device),
    }


class Clicks(nn.Module):
    """Embeddings of users and movies, and a tower of 128-128-1 on them."""

    def __init__(self, width: int, sparse: bool) -> None:
        super().__init__()
        self.user, self.movie = (nn.Embedding(size, width, sparse=sparse) for size in SIZES)
        layers = [nn.Linear(2 * width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)]
        self.tower = nn.Sequential(*layers)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tower(torch.cat([self.user(batch["user"]), self.movie(batch["movie"])], 1)).squeeze(1)


def predict(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch), batch["liked"]


def fitted(width: int, batch: int, steps: int, sparse: bool = True, count: int = 4_000_000, **options: Any) -> float:
    """In a rank: rows per second of `fit` on rows that are on the rank's device, after 20 steps that do not count."""
    from nbdist.recsys.loader import MemoryLoader
    from nbdist.recsys.sharding import replicate
    from nbdist.recsys.training import fit

    torch.manual_seed(0)
    model = replicate(Clicks(width, sparse), lambda some: torch.optim.Adagrad(some, lr=0.01))
    train = MemoryLoader(rows(max(4 * batch, count), rank_device()), batch, shuffle=True, remainder="drop")
    fit(model, predict, train, steps=20, progress=False, **options)
    return fit(model, predict, train, steps=steps, progress=False, **options)[-1].rows_per_second

"""Invented clicks with a planted structure, a model for them, and how it is trained in a rank: for several tests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from nbdist.recsys.loader import MemoryLoader, keyed_jagged
from nbdist.recsys.sharding import replicate, shard

USERS, MOVIES = 120, 80


class Clicks(nn.Module):
    """Pooled embeddings of user and movie, and a small tower over them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = {"user": USERS, "movie": MOVIES}
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
                for name, rows in sizes.items()
            ]
        )
        self.over = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(features).values()).squeeze(1)  # (rows,)


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(keyed_jagged(batch, ["user", "movie"])), batch["liked"]


def noisy(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """With a little of every random generator in it, so that a run is another one where any of them is."""
    logits, labels = predict(model, batch)
    noise = random.random() + np.random.random() + torch.rand(())
    return logits * (1 + 0.01 * noise if model.training else 1.0), labels


def clicks(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows of the same users and movies for any seed: who likes much, what is liked much, and a little of taste."""
    fixed, draw = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    taste, character = torch.randn(USERS, 2, generator=fixed), torch.randn(MOVIES, 2, generator=fixed)
    generous, popular = torch.randn(USERS, generator=fixed), torch.randn(MOVIES, generator=fixed)
    user = torch.randint(USERS, (rows,), generator=draw)
    movie = torch.randint(MOVIES, (rows,), generator=draw)
    score = generous[user] + popular[movie] + 0.2 * (taste[user] * character[movie]).sum(1)
    liked = torch.sigmoid(2 * score) > torch.rand(rows, generator=draw)
    return {"user": user, "movie": movie, "liked": liked}


def build(how: str, dropout: float = 0.0, optimizer: Any = None, tables: dict[str, Any] | None = None) -> Any:
    """A model, "sharded" or "replicated", that begins with the same weights either way, and learns by Adagrad.

    Another `optimizer` belongs to the dense layers or, if it is replicated, of all; `tables` is for `shard`.
    """
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    model = Clicks(dropout)

    def dense(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.1, eps=1e-8)

    dense = optimizer or dense
    if how == "replicated":
        return replicate(model, dense)
    strategies = {"user": "row_wise", "movie": "table_wise"}
    options = {"optimizer": "adagrad", "lr": 0.1, **(tables or {})}
    return shard(model, strategies, batch_size=64, dense_optimizer=dense, **options)


def loaders(rows: int, batch_size: int, seed: int = 3, keyed: Any = ()) -> tuple[MemoryLoader, MemoryLoader]:
    train = MemoryLoader(clicks(rows, 1), batch_size, shuffle=True, seed=seed, keyed=keyed)
    return train, MemoryLoader(clicks(rows // 4 + 1, 2), 2 * batch_size)

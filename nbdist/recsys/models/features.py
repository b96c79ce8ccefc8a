"""What click models begin with: a vector for each column of codes, and the numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.mlp import MLP

from ..loader.columns import Columns, keyed_jagged

_TAKEN = frozenset(dir(nn.ModuleDict()))


def mean_tables(columns: Mapping[str, int], embedding_dim: int, device: torch.device | str) -> EmbeddingBagCollection:
    """A table for each column, called like it; a list is the mean of its vectors.

    Args:
        columns: Column of codes → how many there are.
        embedding_dim: Columns of each table.
        device: Of the tables.

    Raises:
        ValueError: TorchRec, which keeps tables as modules by their names, can have none of that name.
    """
    for name in columns:
        if not name or "." in name or name in _TAKEN:
            raise ValueError(f"no table can be called {name!r}, which means something else to torch: rename the column")
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=size,
                embedding_dim=embedding_dim,
                feature_names=[name],
                pooling=PoolingType.MEAN,
            )
            for name, size in columns.items()
        ],
        device=torch.device(device),
    )


class Features(nn.Module):
    """The columns that a click model takes of a batch.

    Args:
        columns: Column of codes → how many there are.
        numbers: Columns of numbers.
        embedding_dim: Columns of each table.
        device: Of the tables.

    Raises:
        ValueError: No column of codes, or one that is in both.
    """

    def __init__(
        self, columns: Mapping[str, int], numbers: Sequence[str], embedding_dim: int, device: torch.device | str
    ) -> None:
        super().__init__()
        if not columns:
            raise ValueError("a click model needs a column of codes")
        if both := columns.keys() & set(numbers):
            raise ValueError(f"column {min(both)!r} is one of codes and one of numbers: choose")
        self.columns, self.numbers = list(columns), list(numbers)
        self.embeddings = mean_tables(columns, embedding_dim, device)

    def forward(self, batch: Columns) -> tuple[Tensor, Tensor]:
        """Vectors, shape (rows, columns, embedding_dim), and numbers, float32, shape (rows, numbers)."""
        pooled: Tensor = self.embeddings(keyed_jagged(batch, self.columns)).values()
        numbers = [pooled[:, :0]]  # so that there is one
        for name in self.numbers:
            column = batch.get(name)
            if not isinstance(column, Tensor) or column.ndim != 1:
                raise ValueError(f"the batch has no column {name!r} with one number per row, but {', '.join(batch)}")
            numbers.append(column[:, None].to(pooled.dtype))
        return pooled.unflatten(1, (len(self.columns), -1)), torch.cat(numbers, dim=1)


def to_logit(width: int, layers: Sequence[int]) -> nn.Sequential:
    """Layers with ReLU, and a number at their end."""
    hidden = [MLP(width, list(layers))] if layers else []
    return nn.Sequential(*hidden, nn.Linear(layers[-1] if layers else width, 1))

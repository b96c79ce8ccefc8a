"""The input of click models: a vector for each column of codes, and the numbers unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...checks import shown
from ..loader.columns import Columns
from .tables import Cardinality, PooledTables, check_cardinalities


class Features(nn.Module):
    """The columns of a batch that a click model uses.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`. The vectors of a list are averaged.
        dense_features: The names of columns with one number per row.
        embedding_dim: The width of the tables.
        device: The device of the tables.

    Raises:
        ValueError: There is no column of codes, or a column is named twice.
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str],
        embedding_dim: int,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        check_cardinalities(cardinalities)
        if isinstance(dense_features, str) or not isinstance(dense_features, Sequence):
            raise TypeError(f"`dense_features` must be a list of names of columns, got {shown(dense_features)}")
        if not cardinalities:
            raise ValueError("`cardinalities` must have a column of codes, got none")
        if both := cardinalities.keys() & set(dense_features):
            raise ValueError(f"column {min(both)!r} is in `cardinalities` and in `dense_features`: remove it from one")
        if len(set(dense_features)) < len(dense_features):
            raise ValueError(f"`dense_features` must name each column once, got {list(dense_features)}")
        self.columns, self.dense_features = list(cardinalities), list(dense_features)
        self.embeddings = PooledTables(cardinalities, embedding_dim=embedding_dim, device=device)

    def forward(self, batch: Columns) -> tuple[Tensor, Tensor]:
        """Return vectors, shape (rows, columns, embedding_dim), and numbers, float32, shape (rows, numbers)."""
        pooled: Tensor = self.embeddings(batch)
        numbers = [pooled[:, :0]]  # so that there is one
        for name in self.dense_features:
            column = batch.get(name)
            if not isinstance(column, Tensor) or column.ndim != 1:
                raise ValueError(
                    f"the batch has no column {name!r} with one number per row; its columns are {', '.join(batch)}"
                )
            numbers.append(column[:, None].to(pooled.dtype))
        return pooled.unflatten(1, (len(self.columns), -1)), torch.cat(numbers, dim=1)


def linear_layers(widths: Sequence[int]) -> nn.Sequential:
    """Make linear layers from each width to the next one, with ReLU between them."""
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])

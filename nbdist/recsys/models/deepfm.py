"""DeepFM: a factorization machine and layers over the same embeddings (Guo et al., IJCAI 2017, arXiv:1703.04247)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..loader.columns import Columns
from .features import Features, linear_layers
from .tables import Cardinality


class DeepFM(nn.Module):
    """A click model that adds a linear part, the inner products of all pairs of columns, and layers over all columns.

    As in the paper, the embedding of a number is a vector times the number. The linear part of a code is a linear
    function of its embedding, not a table of its own, because TorchRec cannot shard a table with a single column.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`. Each column has a table of the same name. The vectors of a list are averaged.
        dense_features: The names of columns with one number per row. The numbers should be of similar size, for example
            after `etl.Log`.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        top_mlp: The widths of the layers over the embeddings.
        device: The device of the tables: "meta" if they will be sharded because they are too large for one rank.

    Raises:
        ValueError: There is no column of codes.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import DeepFM
        >>> model = DeepFM({"user": 10, "movie": 20}, embedding_dim=8, top_mlp=[16])
        >>> model({"user": torch.tensor([2, 7]), "movie": torch.tensor([3, 3])}).shape
        torch.Size([2])
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str] = (),
        *,
        embedding_dim: int = 64,
        top_mlp: Sequence[int] = (128, 64),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.features = Features(cardinalities, dense_features, embedding_dim, device)
        self.dense_embeddings = (
            nn.Parameter(torch.empty(len(dense_features), embedding_dim)) if dense_features else None
        )
        if self.dense_embeddings is not None:
            nn.init.normal_(self.dense_embeddings, std=embedding_dim**-0.5)
        width = (len(cardinalities) + len(dense_features)) * embedding_dim
        self.linear = nn.Linear(width, 1)
        self.top_mlp = linear_layers([width, *top_mlp, 1])

    def forward(self, batch: Columns) -> Tensor:
        """Return the logits of a batch, shape (rows,)."""
        vectors, numbers = self.features(batch)  # (rows, columns, dim), (rows, numbers)
        if self.dense_embeddings is not None:
            vectors = torch.cat([vectors, numbers[:, :, None] * self.dense_embeddings], dim=1)  # (rows, fields, dim)
        # The inner products of all pairs: half of what the square of their sum has more than their squares.
        products = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2  # (rows,)
        flat = vectors.flatten(1)
        return (self.linear(flat) + self.top_mlp(flat)).squeeze(1) + products  # type: ignore[no-any-return]

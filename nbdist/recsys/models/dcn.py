"""DCNv2: cross layers over all columns, then other layers (Wang et al., WWW 2021, arXiv:2008.13535)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loader.columns import Columns
from .features import Features, linear_layers
from .tables import Cardinality


class DCNv2(nn.Module):
    """A click model whose cross layers multiply embeddings and numbers with one another, before other layers.

    This is the stacked form in the paper: each cross layer raises the degree of the products by one.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`. Each column has a table of the same name. The vectors of a list are averaged.
        dense_features: The names of columns with one number per row. The numbers should be of similar size, for example
            after `etl.Log`.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        crosses: The number of cross layers.
        low_rank: The inner width if each cross matrix is a product of two narrow matrices. A quarter of the width of
            all embeddings is advised. None: full matrices.
        top_mlp: The widths of the layers between the cross layers and the logit.
        device: The device of the tables: "meta" if they will be sharded because they are too large for one rank.

    Raises:
        ValueError: There is no column of codes, no cross layer, or `low_rank` is below 1.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import DCNv2
        >>> model = DCNv2({"user": 10, "movie": 20}, ["age"], embedding_dim=8, low_rank=4)
        >>> rows = {"user": torch.tensor([2, 7]), "movie": torch.tensor([3, 3]), "age": torch.tensor([0.1, 0.7])}
        >>> model(rows).shape
        torch.Size([2])
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str] = (),
        *,
        embedding_dim: int = 64,
        crosses: int = 3,
        low_rank: int | None = None,
        top_mlp: Sequence[int] = (128, 64),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if crosses < 1 or (low_rank is not None and low_rank < 1):
            raise ValueError(f"`crosses` and `low_rank` must be at least 1, got {crosses} and {low_rank}")
        self.features = Features(cardinalities, dense_features, embedding_dim, device)
        width = len(cardinalities) * embedding_dim + len(dense_features)
        self.crosses = Crosses(width, crosses, low_rank)
        self.top_mlp = linear_layers([width, *top_mlp, 1])

    def forward(self, batch: Columns) -> Tensor:
        """Return the logits of a batch, shape (rows,)."""
        vectors, numbers = self.features(batch)  # (rows, columns, dim), (rows, numbers)
        crossed = self.crosses(torch.cat([vectors.flatten(1), numbers], dim=1))
        return self.top_mlp(crossed).squeeze(1)  # type: ignore[no-any-return]


class Crosses(nn.Module):
    """Layers that multiply the input of the first layer by a linear function of the previous layer's output.

    Args:
        width: The width of input and output.
        count: The number of layers.
        low_rank: The inner width if a layer's matrix is a product of two narrow matrices. None: one full matrix.
    """

    def __init__(self, width: int, count: int, low_rank: int | None) -> None:
        super().__init__()
        self.outer = nn.ParameterList(_xavier(width, low_rank or width) for _ in range(count))
        self.inner = nn.ParameterList(_xavier(low_rank, width) for _ in range(count)) if low_rank else None
        self.bias = nn.ParameterList(torch.zeros(width) for _ in range(count))

    def forward(self, first: Tensor) -> Tensor:
        """Transform a tensor of shape (rows, width) to the same shape."""
        x = first
        for number, (outer, bias) in enumerate(zip(self.outer, self.bias, strict=True)):
            narrow = x if self.inner is None else functional.linear(x, self.inner[number])
            x = first * functional.linear(narrow, outer, bias) + x
        return x


def _xavier(out: int, width: int) -> Tensor:
    return nn.init.xavier_normal_(torch.empty(out, width))

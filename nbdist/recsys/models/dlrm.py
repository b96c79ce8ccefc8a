"""DLRM: pairwise products of embeddings, and layers over them (Naumov et al., 2019, arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..loader.columns import Columns
from .features import Features, linear_layers
from .tables import Cardinality


class DLRM(nn.Module):
    """A click model with the pairwise products of the columns' embeddings and of a vector made from the numbers.

    The products and that vector are the input of further layers.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`. Each column has a table of the same name. The vectors of a list are averaged.
        dense_features: The names of columns with one number per row, for example after `etl.Log`. Empty: the products
            are of embeddings alone.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        bottom_mlp: The widths of the layers between the numbers and their vector.
        top_mlp: The widths of the layers between the products and the logit.
        device: The device of the tables: "meta" if they will be sharded because they are too large for one rank.

    Raises:
        ValueError: There are no products: no column of codes, or only one and no numbers.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.models import DLRM
        >>> from nbdist.recsys.sharding import shard
        >>> from nbdist.recsys.training import fit
        >>> def predict(model, batch):
        ...     return model(batch), batch["liked"]
        >>> def train():
        ...     torch.manual_seed(0)
        ...     user, movie = torch.arange(400) % 20, torch.arange(400) % 9
        ...     rows = {"user": user, "movie": movie, "liked": user % 2 == movie % 2}
        ...     model = DLRM({"user": 20, "movie": 9}, embedding_dim=8, top_mlp=[16])
        ...     options = {"optimizer": "adagrad", "lr": 0.3, "dense_optimizer": torch.optim.Adam}
        ...     model = shard(model, {"user": "row_wise"}, batch_size=50, **options)
        ...     history = fit(model, predict, MemoryLoader(rows, 50, shuffle=True), epochs=40, progress=False)
        ...     return history[-1].loss, model.gather()
        >>> loss, model = in_ddp(2, train)
        >>> loss < 0.1
        True
        >>> chances = model({"user": torch.tensor([6, 6]), "movie": torch.tensor([4, 5])}).sigmoid()
        >>> bool(chances[0] > 0.9 and chances[1] < 0.1)
        True
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        dense_features: Sequence[str] = (),
        *,
        embedding_dim: int = 64,
        bottom_mlp: Sequence[int] = (64,),
        top_mlp: Sequence[int] = (128, 64),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.features = Features(cardinalities, dense_features, embedding_dim, device)
        if len(cardinalities) == 1 and not dense_features:
            raise ValueError(
                "`cardinalities` must have two columns or more where there are no `dense_features`, got one: there is "
                "nothing to take products of"
            )
        self.bottom_mlp: nn.Sequential | None = None
        if dense_features:
            self.bottom_mlp = nn.Sequential(
                *linear_layers([len(dense_features), *bottom_mlp, embedding_dim]), nn.ReLU()
            )
        vectors = len(cardinalities) + bool(dense_features)
        pairs = vectors * (vectors - 1) // 2
        self.top_mlp = linear_layers([pairs + (embedding_dim if dense_features else 0), *top_mlp, 1])

    def forward(self, batch: Columns) -> Tensor:
        """Return the logits of a batch, shape (rows,)."""
        vectors, numbers = self.features(batch)  # (rows, columns, dim), (rows, numbers)
        if self.bottom_mlp is not None:
            vectors = torch.cat([self.bottom_mlp(numbers)[:, None], vectors], dim=1)
        first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1, device=vectors.device)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]  # (rows, pairs)
        if self.bottom_mlp is not None:
            products = torch.cat([vectors[:, 0], products], dim=1)  # (rows, dim + pairs)
        return self.top_mlp(products).squeeze(1)  # type: ignore[no-any-return]

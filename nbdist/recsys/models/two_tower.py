"""Two towers: a vector for the query, such as a user, a vector for each item, and their product as the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..loader.columns import Columns
from .features import linear_layers
from .tables import Cardinality, PooledTables


class Tower(nn.Module):
    """A module that maps each row to a vector: embeddings of its columns (the mean for lists), followed by layers.

    Args:
        cardinalities: A mapping from the name of each column of codes to its number of codes, or from a column of raw
            ids to a `RawIds`. Each column has a table of the same name.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        mlp: The widths of the layers over the embeddings, with ReLU between them. None: the vector is the sum of the
            embeddings.
        device: The device of the tables: "meta" if they will be sharded because they are too large for one rank.

    Raises:
        ValueError: There is no column.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import Tower
        >>> tower = Tower({"user": 10}, embedding_dim=8, mlp=[4])
        >>> tower({"user": torch.tensor([2, 7])}).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        cardinalities: Mapping[str, Cardinality],
        *,
        embedding_dim: int = 64,
        mlp: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if not cardinalities:
            raise ValueError("`cardinalities` must have a column of codes, got none")
        self.columns = list(cardinalities)
        self.embeddings = PooledTables(cardinalities, embedding_dim=embedding_dim, device=device)
        self.mlp = linear_layers([len(cardinalities) * embedding_dim, *mlp]) if mlp else None

    def forward(self, batch: Columns) -> Tensor:
        """Return the vectors of a batch, shape (rows, the last width). Other columns of the batch are ignored."""
        pooled: Tensor = self.embeddings(batch)  # (rows, columns * dim)
        if self.mlp is not None:
            return self.mlp(pooled)  # type: ignore[no-any-return]
        return pooled.unflatten(1, (len(self.columns), -1)).sum(1)  # type: ignore[no-any-return]


class TwoTower(nn.Module):
    """A retrieval model: the score of an item is the product of the query's vector and the item's vector.

    It is trained with `softmax_logits` to distinguish the item of a row from other items; the vectors of all items then
    make an `ItemIndex`.

    Args:
        query: The columns of the query, such as the user: a mapping from each name to the number of codes.
        item: The columns of the item, in the same form.
        embedding_dim: The width of the tables. It must be a multiple of 4 if they are sharded.
        mlp: The layers of both towers; see `Tower`.
        device: The device of the tables; see `Tower`.

    Raises:
        ValueError: There is no column, or a column is in both towers.

    Examples:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader
        >>> from nbdist.recsys.models import TwoTower, softmax_logits
        >>> from nbdist.recsys.sharding import replicate
        >>> from nbdist.recsys.training import fit
        >>> def predict(model, batch):
        ...     return softmax_logits(*model(batch), batch["movie"])
        >>> def train():
        ...     likes = {"user": torch.arange(100) % 20, "movie": torch.arange(100) % 10}
        ...     model = TwoTower({"user": 20}, {"movie": 10}, embedding_dim=8)
        ...     model = replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        ...     fit(model, predict, MemoryLoader(likes, 25), epochs=40, loss=cross_entropy, progress=False)
        ...     return model.gather()
        >>> model = in_ddp(2, train)
        >>> users, movies = torch.arange(20), torch.arange(10)
        >>> (model.query({"user": users}) @ model.item({"movie": movies}).T).argmax(1).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        query: Mapping[str, int],
        item: Mapping[str, int],
        *,
        embedding_dim: int = 64,
        mlp: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if both := query.keys() & item.keys():
            raise ValueError(
                f"column {min(both)!r} is in both towers: rename it in one of them, because each table has the name of "
                "its column"
            )
        self.query = Tower(query, embedding_dim=embedding_dim, mlp=mlp, device=device)
        """The tower of the query."""
        self.item = Tower(item, embedding_dim=embedding_dim, mlp=mlp, device=device)
        """The tower of the item."""

    def forward(self, batch: Columns, negatives: Columns | None = None) -> tuple[Tensor, Tensor]:
        """Return the vectors of queries and of items.

        Args:
            batch: Rows with the columns of both towers.
            negatives: The columns of further items, such as the result of `draw_rows`.

        Returns:
            The vectors of queries, shape (rows, width), and of items, shape (rows + negatives, width).
        """
        items = self.item(batch)
        if negatives is not None:
            items = torch.cat([items, self.item(negatives)])
        return self.query(batch), items

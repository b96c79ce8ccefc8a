"""SASRec: the next item of a user, by attention over the earlier items (Kang and McAuley, ICDM 2018)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..loader.columns import Column, Columns, Ragged
from .tables import SequenceTables


class SASRec(nn.Module):
    """A model that maps the history of each row to a vector, whose products with item vectors are scores of the next
    item.

    It is trained to distinguish each item of a history, given the items before it, from drawn items. Items and
    histories share one table, and so one vocabulary: ``Categorify(("movie", "history"))``.

    Args:
        items: The number of codes of items.
        column: The column of histories: lists of codes in the order of time. The table is called like it.
        length: The number of last items of a history that count.
        embedding_dim: Columns of the table, and width of the layers.
        blocks: Layers of attention.
        heads: The number of heads of each block; `embedding_dim` is a multiple.
        dropout: While it is trained.
        temperature: The divisor of logits, which are cosines then: vectors then have the length 1. None: they are plain
            products.
        device: The device of the table: "meta" if it is sharded and too large for one rank.

    Examples:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from nbdist import in_ddp
        >>> from nbdist.recsys.loader import MemoryLoader, Ragged
        >>> from nbdist.recsys.models import SASRec, draw_rows
        >>> from nbdist.recsys.sharding import replicate
        >>> from nbdist.recsys.training import fit
        >>> items = {"movie": torch.arange(2, 12)}
        >>> def predict(model, batch):
        ...     return model(batch, draw_rows(items, 64)["movie"])
        >>> def train():
        ...     torch.manual_seed(0)
        ...     start = torch.arange(60)[:, None] % 10
        ...     walks = 2 + (start + torch.arange(6)) % 10  # each movie is followed by the next one
        ...     rows = {"history": Ragged(walks.flatten(), torch.arange(61) * 6)}
        ...     model = SASRec(12, length=8, embedding_dim=16, blocks=1)
        ...     model = replicate(model, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
        ...     fit(model, predict, MemoryLoader(rows, 15), epochs=40, loss=cross_entropy, progress=False)
        ...     return model.gather()
        >>> model = in_ddp(2, train).eval()
        >>> query = model.query({"history": Ragged(torch.tensor([4, 5, 6]), torch.tensor([0, 3]))})
        >>> int((query @ model.item(items["movie"]).T).argmax()) + 2
        7
    """

    def __init__(
        self,
        items: int,
        *,
        column: str = "history",
        length: int = 50,
        embedding_dim: int = 64,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        temperature: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.column, self.length, self.temperature = column, length, temperature
        # Small, so that steps of Adam turn the vectors of rare items too; multiplied again where they are read.
        small = functools.partial(nn.init.normal_, std=1 / embedding_dim)
        self.embeddings = SequenceTables({column: items}, embedding_dim=embedding_dim, init=small, device=device)
        self.positions = nn.Embedding(length, embedding_dim)
        nn.init.normal_(self.positions.weight, std=embedding_dim**-0.5)
        self.dropout = nn.Dropout(dropout)
        block = nn.TransformerEncoderLayer(
            embedding_dim, heads, embedding_dim, dropout, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(embedding_dim), enable_nested_tensor=False)

    def forward(self, batch: Columns, negatives: Tensor) -> tuple[Tensor, Tensor]:
        """Score the next item, and some drawn items, at each position of the histories: logits for `cross_entropy`.

        Args:
            batch: Rows with the column of histories. One with less than two items teaches nothing.
            negatives: Codes of items that were drawn, any as likely as any other; see `draw_rows`.

        Returns:
            Logits, shape (places, 1 + negatives), where what came next is the first, and so zeros, shape (places,).
        """
        codes, there = padded(batch[self.column], self.length + 1)  # (rows, length + 1)
        rows = len(codes)
        # One look-up for all: one list of what was drawn, and one for each history.
        starts = len(negatives) + (self.length + 1) * torch.arange(rows + 1, device=codes.device)
        offsets = torch.cat([starts.new_zeros(1), starts])
        both = Ragged(torch.cat([negatives, codes.flatten()]), offsets)
        drawn, whole = self._look_up(both).split([len(negatives), codes.numel()])
        vectors = whole.view(-1, self.length + 1, whole.shape[1])
        states = self._states(vectors[:, :-1], there[:, 1:].sum(1))[there[:, 1:]]  # (places, columns)
        following, next_code = vectors[:, 1:][there[:, 1:]], codes[:, 1:][there[:, 1:]]
        states, following, drawn = self._scaled(states), self._scaled(following), self._scaled(drawn)
        own = (states * following).sum(1, keepdim=True)
        others = (states @ drawn.T).masked_fill(next_code[:, None] == negatives[None, :], -torch.inf)
        logits = torch.cat([own, others], dim=1) / (self.temperature or 1.0)
        return logits, torch.zeros_like(next_code, dtype=torch.int64)

    def query(self, batch: Columns) -> Tensor:
        """Return the vector of each row's whole history, shape (rows, columns); zeros for an empty history.

        Works on the plain module, as `gather` returns it.
        """
        codes, there = padded(batch[self.column], self.length)
        vectors = self._look_up(codes.flatten())
        lengths = there.sum(1)
        states = self._states(vectors.view(-1, self.length, vectors.shape[1]), lengths)
        last = (lengths - 1).clamp(min=0)
        found = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
        return self._scaled(found) * there[:, :1]

    def item(self, codes: Tensor) -> Tensor:
        """Return the vectors of items, shape (items, columns). Works on the plain module."""
        return self._scaled(self._look_up(codes))

    def _scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self.temperature is None else nn.functional.normalize(vectors)

    def _look_up(self, codes: Column) -> Tensor:
        """Return the vector of each code, shape (codes, columns)."""
        return self.embeddings({self.column: codes})[self.column]  # type: ignore[no-any-return]

    def _states(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Encode each position together with the positions before it; shape (rows, length, columns)."""
        places = torch.arange(self.length, device=vectors.device)
        hidden = places[None, :] > places[:, None]  # what stands behind the end of a history is seen by nothing in it
        # Counted from the end: a history is one longer when it is asked about than when it was trained.
        age = (lengths[:, None] - 1 - places).clamp(min=0)  # (rows, length)
        read = vectors * vectors.shape[2] ** 0.5 + self.positions(age)
        states: Tensor = self.blocks(self.dropout(read), hidden, is_causal=True)
        return states


def padded(column: Column, length: int) -> tuple[Tensor, Tensor]:
    """Pad lists of codes to rows of equal length: the last `length` codes of each list, and zeros after shorter ones.

    Args:
        column: Lists of codes, in the order of time.
        length: The length of each row.

    Returns:
        Codes, shape (rows, length), and which of them are there, booleans of the same shape.

    Raises:
        ValueError: The column is none of lists.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.models import padded
        >>> codes, there = padded(Ragged(torch.tensor([7, 8, 9, 5]), torch.tensor([0, 3, 4])), 2)
        >>> codes
        tensor([[8, 9],
                [5, 0]])
        >>> there
        tensor([[ True,  True],
                [ True, False]])
    """
    if not isinstance(column, Ragged):
        raise ValueError(f"a column of lists is needed, and this one has the shape {tuple(column.shape)}")
    values, offsets = column
    # A server's lists are filled up with -1 at their ends; see `triton.onnx`.
    known = torch.cat([offsets.new_zeros(1), (values >= 0).cumsum(0)])
    ends = offsets[:-1] + known[offsets[1:]] - known[offsets[:-1]]
    starts = torch.maximum(ends - length, offsets[:-1])
    places = starts[:, None] + torch.arange(length, device=values.device)  # (rows, length)
    there = places < ends[:, None]
    some = torch.cat([values, values.new_zeros(1)])  # so that there is one
    return some[places.clamp(max=len(values))].where(there, 0), there

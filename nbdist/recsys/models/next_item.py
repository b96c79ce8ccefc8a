"""The common part of models of the next item: the table of items, the training on each position, and the search."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from ...checks import check_count
from ..loader.columns import Column, Columns, Ragged, rows_of
from .softmax import in_lists
from .tables import SequenceTables


class NextItemModel(nn.Module):
    """The base class of models that map the history of each row to a vector, whose products with item vectors are
    scores of the next item.

    The model is trained to distinguish each item of a history, given the items before it, from drawn items. Items and
    histories share one table, and so one vocabulary: ``Categorify(("movie", "history"))``. A subclass implements
    `_states`.

    Args:
        items: The number of codes of items.
        column: The column of histories: lists of codes in the order of time. The table has the same name.
        length: The number of last items of a history that the model reads.
        embedding_dim: The width of the table and of the layers.
        dropout: The share of values that are set to zero during training.
        temperature: The divisor of the logits. With one, logits are cosines divided by it; with None, dot products that
            are not divided.
        device: The device of the table: "meta" if it will be sharded because it is too large for one rank.
    """

    def __init__(
        self,
        items: int,
        *,
        column: str,
        length: int,
        embedding_dim: int,
        dropout: float,
        temperature: float | None,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        check_count(items, least=1, name="`items`")
        check_count(length, least=1, name="`length`")
        if temperature is not None and not 0 < temperature < math.inf:
            raise ValueError(f"`temperature` must be None or a number above 0, got {temperature!r}")
        self.column, self.length, self.temperature = column, length, temperature
        # Small, so that steps of Adam turn the vectors of rare items too; multiplied again where they are read.
        small = functools.partial(nn.init.normal_, std=1 / embedding_dim)
        self.embeddings = SequenceTables({column: items}, embedding_dim=embedding_dim, init=small, device=device)
        self.positions = nn.Embedding(length, embedding_dim)
        nn.init.normal_(self.positions.weight, std=embedding_dim**-0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Columns, negatives: Tensor, *, exclude: Ragged | None = None) -> tuple[Tensor, Tensor]:
        """Score the next item, and some drawn items, at each position of the histories: logits for `cross_entropy`.

        Args:
            batch: Rows with the column of histories. The model learns nothing from a history with fewer than two items.
            negatives: The codes of items that were drawn uniformly; see `draw_rows`.
            exclude: The codes of items that are no negatives for a row, a list for each row. ``batch["history"]``
                leaves out all items of the history, as the authors of SASRec do. None: only the next item itself is
                left out, as by the authors of HSTU; the authors of gSASRec and eSASRec leave out none.

        Returns:
            The logits, shape (places, 1 + negatives), with the actual next item in column 0 and -inf for those left
            out; and the targets, zeros, shape (places,).

        Raises:
            ValueError: The column does not have lists, or `exclude` does not have a list for each row.
        """
        codes, there = padded(batch[self.column], self.length + 1)  # (rows, length + 1)
        rows = len(codes)
        if exclude is not None and rows_of(exclude) != rows:
            raise ValueError(f"`exclude` must have a list for each of {rows} rows, got {rows_of(exclude)} lists")
        # One look-up for all: one list of what was drawn, and one for each history.
        starts = len(negatives) + (self.length + 1) * torch.arange(rows + 1, device=codes.device)
        offsets = torch.cat([starts.new_zeros(1), starts])
        both = Ragged(torch.cat([negatives, codes.flatten()]), offsets)
        drawn, whole = self._look_up(both).split([len(negatives), codes.numel()])
        vectors = whole.view(-1, self.length + 1, whole.shape[1])
        read = self._read(vectors[:, :-1], there[:, 1:].sum(1))
        states = self._states(read, self._times(batch))[there[:, 1:]]  # (places, columns)
        following, next_code = vectors[:, 1:][there[:, 1:]], codes[:, 1:][there[:, 1:]]
        states, following, drawn = self._scaled(states), self._scaled(following), self._scaled(drawn)
        own = (states * following).sum(1, keepdim=True)
        left_out = next_code[:, None] == negatives[None, :]  # (places, negatives)
        if exclude is not None:
            left_out |= in_lists(negatives, exclude)[there[:, 1:].nonzero()[:, 0]]
        others = (states @ drawn.T).masked_fill(left_out, -torch.inf)
        logits = torch.cat([own, others], dim=1) / (self.temperature or 1.0)
        return logits, torch.zeros_like(next_code, dtype=torch.int64)

    def query(self, batch: Columns) -> Tensor:
        """Return the vector of each row's whole history, shape (rows, columns); zeros for an empty history.

        Works on the plain module, as `gather` returns it.
        """
        codes, there = padded(batch[self.column], self.length)
        vectors = self._look_up(codes.flatten())
        lengths = there.sum(1)
        read = self._read(vectors.view(-1, self.length, vectors.shape[1]), lengths)
        states = self._states(read, self._times(batch, asked=True))
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

    def _read(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Return the input of the layers: the vectors of items and their positions added, shape (rows, length,
        columns)."""
        # Counted from the end: a history is one longer when it is asked about than when it was trained.
        age = (lengths[:, None] - 1 - torch.arange(self.length, device=vectors.device)).clamp(min=0)  # (rows, length)
        read: Tensor = self.dropout(vectors * vectors.shape[2] ** 0.5 + self.positions(age))
        return read

    def _times(self, batch: Columns, asked: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return the time of each position, and the time for which its next item is predicted, both of shape (rows,
        length)."""
        return None

    def _states(self, read: Tensor, times: tuple[Tensor, Tensor] | None) -> Tensor:
        """Encode each position together with the positions before it; shape (rows, length, columns)."""
        raise NotImplementedError

    def _later(self, device: torch.device) -> Tensor:
        """Return a mask, shape (length, length): whether the second position comes later than the first."""
        places = torch.arange(self.length, device=device)
        return places[None, :] > places[:, None]  # what stands behind the end of a history is seen by nothing in it


def padded(column: Column, length: int, codes: Ragged | None = None) -> tuple[Tensor, Tensor]:
    """Pad lists of codes to rows of equal length: the last `length` codes of each list, and zeros after shorter ones.

    Args:
        column: Lists of codes, in the order of time; or of any numbers, with `codes`.
        length: The length of each row.
        codes: The lists of codes whose elements the numbers belong to, of the same lengths. None: `column` has codes.

    Returns:
        The codes, shape (rows, length), and a mask of the codes that are not padding, of the same shape.

    Raises:
        ValueError: The column does not have lists.

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
    known = torch.cat([offsets.new_zeros(1), ((values if codes is None else codes.values) >= 0).cumsum(0)])
    ends = offsets[:-1] + known[offsets[1:]] - known[offsets[:-1]]
    starts = torch.maximum(ends - length, offsets[:-1])
    places = starts[:, None] + torch.arange(length, device=values.device)  # (rows, length)
    there = places < ends[:, None]
    some = torch.cat([values, values.new_zeros(1)])  # so that there is one
    # An export keeps `shape[0]` as a symbol, and `len` as the number of its example.
    return some[places.clamp(max=values.shape[0])].where(there, 0), there

"""HSTU, a model of a user's next item that attends to how often and when items came (Zhai et al., ICML 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from ..loader.columns import Columns, Ragged
from .next_item import NextItemModel, padded

#: The bucket of a span of time is its logarithm divided by this (Meta's code: generative-recommenders, `hstu.py`).
_BUCKET = 0.301
_BUCKETS = 128


class HSTU(NextItemModel):
    """A model of a user's next item, like `SASRec`, with layers of pointwise attention.

    The attention weights are not normalized over a history, so that they reflect how often an item occurred. A bias
    depends on the time that has passed between two items.

    Args:
        items: The number of codes of items.
        column: The column of histories: lists of codes in the order of time. The table has the same name.
        times: The column of the times of these items: lists of seconds since 1970, as long as the lists of
            `column`. None: the model uses only the order of the items.
        now: The column of the time, in seconds since 1970, for which `query` predicts the next item. In a batch without
            this column, it is the time of the last item.
        length: The number of last items of a history that the model reads.
        embedding_dim: The width of the table and of the layers. It must be a multiple of `heads`.
        blocks: The number of layers.
        heads: The number of attention heads of each layer.
        dropout: The share of values that are set to zero during training.
        temperature: The divisor of the logits, which are then cosines. None: they are dot products, not divided.
        device: The device of the table: "meta" if it will be sharded because it is too large for one rank.

    Raises:
        ValueError: `embedding_dim` is no multiple of `heads`; or, in a batch, the lists of times and the histories
            differ in length.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.loader import Ragged
        >>> from nbdist.recsys.models import HSTU
        >>> model = HSTU(12, times="times", length=8, embedding_dim=16, blocks=1).eval()
        >>> offsets = torch.tensor([0, 3])
        >>> batch = {"history": Ragged(torch.tensor([4, 5, 6]), offsets)}
        >>> batch["times"] = Ragged(torch.tensor([0, 60, 3600]), offsets)
        >>> model.query({**batch, "now": torch.tensor([7200])}).shape
        torch.Size([1, 16])
    """

    def __init__(
        self,
        items: int,
        *,
        column: str = "history",
        times: str | None = None,
        now: str = "now",
        length: int = 50,
        embedding_dim: int = 64,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
        temperature: float | None = 0.05,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            items,
            column=column,
            length=length,
            embedding_dim=embedding_dim,
            dropout=dropout,
            temperature=temperature,
            device=device,
        )
        if embedding_dim % heads:
            raise ValueError(f"`embedding_dim` must be a multiple of `heads` ({heads}), got {embedding_dim}")
        self.times, self.now = times, now
        self.blocks = nn.ModuleList(
            _Block(embedding_dim, heads, length, dropout, timed=times is not None) for _ in range(blocks)
        )

    def _times(self, batch: Columns, asked: bool = False) -> tuple[Tensor, Tensor] | None:
        if self.times is None:
            return None
        codes, times = batch[self.column], batch[self.times]
        # In an export, a comparison would make the lengths of the example constants.
        if (
            not isinstance(times, Ragged)
            or not isinstance(codes, Ragged)
            or (not torch.compiler.is_compiling() and times.values.shape != codes.values.shape)
        ):
            raise ValueError(f"`{self.times}` must have lists of the same lengths as `{self.column}`")
        known, there = padded(times, self.length + (not asked), codes)
        if not asked:
            return known[:, :-1], known[:, 1:]  # an item is asked for when it comes
        last = known.gather(1, (there.sum(1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
        now = batch.get(self.now, last)
        assert isinstance(now, Tensor)
        following = torch.cat([known[:, 1:], known[:, -1:]], dim=1)
        ends = torch.arange(self.length, device=known.device) == there.sum(1, keepdim=True) - 1
        return known, torch.where(ends, now[:, None].to(known.dtype), following)

    def _states(self, read: Tensor, times: tuple[Tensor, Tensor] | None) -> Tensor:
        seen = ~self._later(read.device)
        buckets = None
        if times is not None:
            passed = (times[1][:, :, None] - times[0][:, None, :]).abs().clamp(min=1)  # (rows, length, length)
            buckets = (passed.float().log() / _BUCKET).long().clamp(max=_BUCKETS - 1)
        for block in self.blocks:
            read = block(read, seen, buckets)
        return read


class _Block(nn.Module):
    """A layer of HSTU: attention, with biases by position and time, whose result is multiplied with gates."""

    def __init__(self, width: int, heads: int, length: int, dropout: float, timed: bool) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.inputs = nn.Parameter(torch.empty(width, 4 * width).normal_(std=0.02))
        self.output = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.output.weight)
        self.dropout = nn.Dropout(dropout)
        self.by_distance = nn.Parameter(torch.empty(length).normal_(std=0.02))
        self.by_time = nn.Parameter(torch.empty(_BUCKETS).normal_(std=0.02)) if timed else None

    def forward(self, x: Tensor, seen: Tensor, buckets: Tensor | None) -> Tensor:
        rows, length, width = x.shape
        both = silu(layer_norm(x, (width,)) @ self.inputs)
        gate, values, queries, keys = both.split(width, dim=2)
        queries, keys, values = (
            one.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for one in (queries, keys, values)
        )
        places = torch.arange(length, device=x.device)
        bias = self.by_distance[(places[:, None] - places).clamp(min=0)]  # (length, length)
        if self.by_time is not None and buckets is not None:
            bias = (bias + self.by_time[buckets])[:, None]  # (rows, 1, length, length)
        weights = silu(queries @ keys.transpose(2, 3) + bias) / self.length * seen
        found = (weights @ values).transpose(1, 2).reshape(rows, length, width)
        result: Tensor = x + self.output(self.dropout(gate * layer_norm(found, (width,))))
        return result

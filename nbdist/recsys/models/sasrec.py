"""SASRec: the next item of a user, by attention over the earlier items (Kang and McAuley, ICDM 2018).

gSASRec is this model with another loss (`calibrated_bce`), eSASRec with other layers (``layers="ligr"``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...checks import check_choice
from .next_item import NextItemModel


class SASRec(NextItemModel):
    """A model that maps the history of each row to a vector, whose products with item vectors are scores of the next
    item.

    The model is trained to distinguish each item of a history, given the items before it, from drawn items. Items and
    histories share one table, and so one vocabulary: ``Categorify(("movie", "history"))``. The loss chooses the kind:

    - `cross_entropy`, a softmax over the items drawn for a batch. With ``layers="ligr"`` this is eSASRec (Tikhonovich
      et al., "eSASRec: Enhancing Transformer-based Recommendations in a Modular Fashion", RecSys 2025).
    - `calibrated_bce`, and ``temperature=None``: gSASRec, which draws many negatives, such as 256.

    Args:
        items: The number of codes of items.
        column: The column of histories: lists of codes in the order of time. The table has the same name.
        length: The number of last items of a history that the model reads.
        embedding_dim: The width of the table and of the layers. It must be a multiple of `heads`.
        blocks: The number of attention layers.
        heads: The number of attention heads of each layer.
        layers: "transformer": layers with a normalization before attention and before the dense layers. "ligr": the
            same, with a learned gate that multiplies the output of attention and of the dense layers before it is
            added; the dense layers are SwiGLU, four times as wide (Borisyuk et al., arXiv:2502.03417).
        dropout: The share of values that are set to zero during training.
        temperature: The divisor of the logits. With one, logits are cosines divided by it; with None, dot products that
            are not divided.
        device: The device of the table: "meta" if it will be sharded because it is too large for one rank.

    Raises:
        ValueError: `layers` has no such value.

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
        layers: Literal["transformer", "ligr"] = "transformer",
        dropout: float = 0.2,
        temperature: float | None = None,
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
        check_choice(layers, ("transformer", "ligr"), name="`layers`")
        if layers == "ligr":
            self.blocks: nn.Module = _GatedBlocks(embedding_dim, heads, blocks, dropout)
        else:
            block = nn.TransformerEncoderLayer(
                embedding_dim, heads, embedding_dim, dropout, batch_first=True, norm_first=True
            )
            norm = nn.LayerNorm(embedding_dim)
            self.blocks = nn.TransformerEncoder(block, blocks, norm, enable_nested_tensor=False)

    def _states(self, read: Tensor, times: tuple[Tensor, Tensor] | None) -> Tensor:
        states: Tensor = self.blocks(read, self._later(read.device), is_causal=True)
        return states


class _GatedBlocks(nn.Module):
    """The layers of LiGR, and a normalization at their end."""

    def __init__(self, width: int, heads: int, blocks: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_GatedBlock(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, later: Tensor, is_causal: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, later, is_causal)
        found: Tensor = self.norm(x)
        return found


class _GatedBlock(nn.Module):
    """A layer that computes x + sigmoid(x W) * f(norm(x)), first with attention as f, then with SwiGLU."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, later: Tensor, is_causal: bool) -> Tensor:
        read = self.norms[0](x)
        seen, _ = self.attention(read, read, read, attn_mask=later, is_causal=is_causal, need_weights=False)
        x = x + self.gates[0](x).sigmoid() * self.dropout(seen)
        gate, values = self.wide(self.norms[1](x)).chunk(2, dim=2)
        result: Tensor = x + self.gates[1](x).sigmoid() * self.dropout(self.narrow(self.dropout(silu(gate) * values)))
        return result

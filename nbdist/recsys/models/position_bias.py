"""A click model that separates the effect of an item's position on a page from its relevance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...checks import check_count
from ..loader.columns import Columns


class PositionBias(nn.Module):
    """A click model with an additional logit for each position, so that the model itself learns relevance alone.

    Items that were shown first are clicked more often, whatever they are. A model that is trained on such clicks
    recommends what was shown first. The logit of the position explains this part of the clicks in training (a "shallow
    tower"; Zhao et al., "Recommending what video to watch next", RecSys 2019). Rows to predict have no position.

    Args:
        model: A model that returns logits, shape (rows,), such as `DeepFM`.
        positions: The number of positions. Position 0 is the first; later ones than the last share its logit.
        column: The column of positions, integers.

    Raises:
        TypeError, ValueError: `positions` is not a number of at least 1.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.models import DeepFM, PositionBias
        >>> model = PositionBias(DeepFM({"user": 10, "movie": 20}, embedding_dim=8), positions=5)
        >>> batch = {"user": torch.tensor([2, 7]), "movie": torch.tensor([3, 3])}
        >>> model({**batch, "position": torch.tensor([0, 4])}).shape
        torch.Size([2])
        >>> model.eval()(batch).shape  # of relevance, without a position
        torch.Size([2])
    """

    def __init__(self, model: nn.Module, positions: int, *, column: str = "position") -> None:
        super().__init__()
        check_count(positions, least=1, name="`positions`")
        self.model, self.column = model, column
        self.bias = nn.Parameter(torch.zeros(positions))

    def forward(self, batch: Columns) -> Tensor:
        """Return the logits of a batch, shape (rows,): of clicks if the batch has positions, else of relevance.

        Raises:
            ValueError: In training mode, the batch has no column of positions; or it has not one number per row.
        """
        logits: Tensor = self.model(batch)
        if self.column not in batch and not self.training:
            return logits
        positions = batch.get(self.column)
        if not isinstance(positions, Tensor) or positions.shape != logits.shape:
            raise ValueError(
                f"the batch has no column {self.column!r} with one position per row; its columns are {', '.join(batch)}"
            )
        return logits + self.bias[positions.long().clamp(0, len(self.bias) - 1)]

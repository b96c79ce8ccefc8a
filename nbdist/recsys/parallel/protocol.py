"""The interface that training, evaluation and snapshots need of a model on all ranks, sharded or replicated."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import nn

from .growth import Growth


class Ahead(Protocol):
    """See `InputsAhead`."""

    def start(self, features: Any) -> None:
        """Begin to send."""

    def proceed(self) -> None:
        """Once it is known how much comes, send on."""


class Parallel(Protocol):
    """A model on all ranks: what `shard` and `replicate` give. All ranks have to call each of its methods."""

    @property
    def model(self) -> nn.Module:
        """Call it like the model that was given."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all parameters on this rank."""

    @property
    def _fused(self) -> bool:
        """True where some tables are updated in the backward pass already, before any `step`."""

    @property
    def _ahead(self) -> Ahead | None:
        """The sender of the next batch's ids to the ranks that hold their rows; None where nothing is sent."""

    def clip_gradients(self, norm: float) -> float:
        """Scale all gradients so that their common norm is at most `norm`; return the norm before that."""

    def gather(self) -> nn.Module | None:
        """The whole model as one plain module, on the CPU of rank 0; None on the other ranks."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`."""

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True, grow: Growth | None = None) -> None:
        """Load what `save` wrote, on any number of ranks.

        Args:
            folder: What `save` was given.
            optimizer: Whether to load the optimizer's state too. Learning rates are not part of it.
            grow: Table, or parameter, that may have more rows here than in the checkpoint → what part each row of the
                checkpoint has in the new ones: `Vocabulary.unknown_weights` of yesterday's workflow. Its rows stay;
                optimizers know nothing of the new ones yet.

        Raises:
            ValueError: The checkpoint is of another model, or of another optimizer.
        """

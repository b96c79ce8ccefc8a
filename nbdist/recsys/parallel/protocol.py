"""The interface that training, evaluation and snapshots need of a model on all ranks, sharded or replicated."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import nn

from .growth import Growth


class Ahead(Protocol):
    """The interface of `InputsAhead`."""

    def start(self, features: Any) -> None:
        """Start sending."""

    def proceed(self) -> None:
        """Continue when the sizes are known."""


class Parallel(Protocol):
    """A model on all ranks, from `shard` or `replicate`. All ranks must call each of its methods."""

    @property
    def model(self) -> nn.Module:
        """The model, which is called like the original model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all parameters on this rank."""

    @property
    def _fused(self) -> bool:
        """True if some tables are updated in the backward pass, before any `step`."""

    @property
    def _ahead(self) -> Ahead | None:
        """The sender of the next batch's ids to the ranks that store their rows; None if no ids are sent."""

    def clip_gradients(self, norm: float) -> float:
        """Scale all gradients so that their common norm is at most `norm`; return the norm before that."""

    def gather(self) -> nn.Module | None:
        """Return the whole model as one plain module, on the CPU of rank 0; None on the other ranks."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`."""

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True, grow: Growth | None = None) -> None:
        """Load a checkpoint of `save`, on any number of ranks.

        Args:
            folder: The folder of `save`.
            optimizer: Whether to load the optimizer's state too. Learning rates are not part of it.
            grow: Table, or parameter, that may have more rows here than in the checkpoint → what part each row of the
                checkpoint has in the new ones: `Vocabulary.unknown_weights` of yesterday's workflow. Its rows stay;
                optimizers know nothing of the new ones yet.

        Raises:
            ValueError: The checkpoint is of another model, or of another optimizer.
        """

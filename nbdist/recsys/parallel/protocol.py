"""The interface to a model on all ranks, sharded or replicated, for training, evaluation and snapshots."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import nn

from .growth import Growth, Renewed


class Ahead(Protocol):
    """The interface of `InputsAhead`, which sends the ids of the next batch while a step runs."""

    def start(self, features: Any) -> None:
        """Start sending the ids of a batch."""

    def proceed(self) -> None:
        """Continue when the sizes are known."""


class Parallel(Protocol):
    """A model on all ranks, from `shard` or `replicate`. All ranks must call each of its methods."""

    @property
    def model(self) -> nn.Module:
        """The model. It is called like the original model."""

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
        """Scale all gradients so that their common norm is at most `norm`. Return the norm before the scaling."""

    def gather(self) -> nn.Module | None:
        """Return the whole model as one plain module, on the CPU of rank 0; None on the other ranks."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save weights and optimizer state with `torch.distributed.checkpoint`."""

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        grow: Growth | None = None,
        renew: Renewed | None = None,
    ) -> None:
        """Load a checkpoint of `save`, on any number of ranks.

        Args:
            folder: The folder that `save` has written.
            optimizer: Whether to load the optimizer's state, too. Learning rates are not part of the state.
            grow: The tables or parameters that may have more rows here than in the checkpoint. A mapping from the name
                of each to the weights by which its old rows are averaged for the new rows: `Vocabulary.unknown_weights`
                of the workflow that the checkpoint was trained with. Old rows are loaded unchanged; for new rows, the
                optimizer has no state yet.
            renew: A mapping from these names to rows of the checkpoint that start like new rows, because their codes
                stand for other values now: `Vocabulary.renewed` of the new vocabulary.

        Raises:
            ValueError: The checkpoint is of another model, or of another optimizer.
        """

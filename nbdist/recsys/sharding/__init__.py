"""Embedding tables sharded over the ranks, with TorchRec: plan, build, train, save, and get one plain model back."""

from .kinds import KINDS, OPTIMIZERS
from .plan import Plan
from .sharded import Sharded, shard
from .uneven import equal_steps

__all__ = ["KINDS", "OPTIMIZERS", "Plan", "Sharded", "equal_steps", "shard"]

"""Embedding tables sharded over the ranks, with TorchRec: plan, build, train, save, and get one plain model back."""

import contextlib

from ..versions import check_torchrec
from .call import shard
from .equal_length import equal_steps
from .plan import Plan
from .sharded import Sharded
from .strategies import OPTIMIZERS, STRATEGIES

with contextlib.suppress(ImportError):  # `shard` raises it again
    check_torchrec()
    from . import build  # noqa: F401  # here, so that the fork server has TorchRec, and not each rank in each call

__all__ = ["OPTIMIZERS", "STRATEGIES", "Plan", "Sharded", "equal_steps", "shard"]

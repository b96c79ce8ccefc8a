"""A model on all ranks, to train, save, and get one plain model back: `shard` and `replicate`.

`shard` divides the embedding tables among the ranks, with TorchRec; `replicate` gives each rank a copy, without it.
"""

import contextlib

from ..parallel.replicated import Replicated, replicate
from ..versions import check_torchrec
from .call import shard
from .equal_length import equal_steps
from .plan import Plan
from .sharded import Sharded
from .strategies import OPTIMIZERS, STRATEGIES

with contextlib.suppress(ImportError):  # `shard` raises it again
    check_torchrec()
    from . import build  # noqa: F401  # here, so that the fork server has TorchRec, and not each rank in each call

__all__ = ["OPTIMIZERS", "STRATEGIES", "Plan", "Replicated", "Sharded", "equal_steps", "replicate", "shard"]

"""Embedding tables sharded over the ranks, with TorchRec: plan, build, train, save, and get one plain model back."""

from ..versions import check_torchrec

check_torchrec()  # before anything imports TorchRec: a wrong pair fails with a riddle

from ..parallel.plan import Plan  # noqa: E402
from ..parallel.sharded import Sharded  # noqa: E402
from .build import shard  # noqa: E402
from .equal_length import equal_steps  # noqa: E402
from .strategies import OPTIMIZERS, STRATEGIES  # noqa: E402

__all__ = ["OPTIMIZERS", "STRATEGIES", "Plan", "Sharded", "equal_steps", "shard"]

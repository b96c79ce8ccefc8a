"""A model on all ranks, with `shard` or `replicate`: train it, save it, and get one plain model back.

`shard` divides the embedding tables among the ranks, with TorchRec; `replicate` gives each rank a copy, without
TorchRec.
"""

import importlib as _importlib
import typing as _typing

from ..parallel.replicated import Replicated, replicate

if _typing.TYPE_CHECKING:
    from .call import shard
    from .equal_length import equal_steps
    from .optimizers import OPTIMIZERS
    from .plan import Plan
    from .sharded import Sharded
    from .strategies import STRATEGIES
    from .summaries import Summary, summary

__all__ = [
    "OPTIMIZERS",
    "STRATEGIES",
    "Plan",
    "Replicated",
    "Sharded",
    "Summary",
    "equal_steps",
    "replicate",
    "shard",
    "summary",
]

_MODULES = {
    "shard": "call",
    "equal_steps": "equal_length",
    "Plan": "plan",
    "Sharded": "sharded",
    "OPTIMIZERS": "optimizers",
    "STRATEGIES": "strategies",
    "Summary": "summaries",
    "summary": "summaries",
}
"""A mapping from public names to their modules, which are imported at the first use: TorchRec takes seconds, and
`replicate` does not need it."""


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)
    value = globals()[name] = getattr(_importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted({*globals(), *__all__})

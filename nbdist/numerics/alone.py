"""Conditions for a second run of a step on one rank: no collectives, nothing compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..system.interrupts import undivided_context

#: Methods of `ProcessGroup`: other ranks take no part in the search.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "barrier", "send", "recv"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)


@undivided_context
def alone() -> Iterator[None]:
    """Make collectives raise in the `with` block, so that they do not wait for ranks that do not take part in the
    search."""
    if "torch._C._distributed_c10d" not in sys.modules and not torch.distributed.is_available():
        yield
        return
    from torch._C import _distributed_c10d as c10d

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a forward pass with collectives cannot be run again on one rank alone")

    def forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        return model.module(*args, **kwargs)

    # As the class holds them: what `getattr` returns of a method in C++ is not bound to a group once it is set again.
    known = {name: method for name, method in vars(c10d.ProcessGroup).items() if name in _COLLECTIVES}
    for name in known:
        setattr(c10d.ProcessGroup, name, refuse)
    replicated: Any = DistributedDataParallel
    own = replicated.forward
    replicated.forward = forward
    try:
        yield
    finally:
        replicated.forward = own
        for name, method in known.items():
            setattr(c10d.ProcessGroup, name, method)


def eager() -> contextlib.AbstractContextManager[Any]:
    """Run compiled code as its uncompiled original, if torch can do so (2.6 or newer)."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None or "torch._dynamo" not in sys.modules else stance("force_eager")

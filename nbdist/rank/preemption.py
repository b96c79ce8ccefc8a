"""Preemption: the notice that a machine of the ranks is about to be taken away. All ranks ask for it together."""

from __future__ import annotations

import os

from ..wire.messages import NOTICES

#: True once this rank has received the notice.
announced = False


def announce() -> None:
    """Store that a machine of the ranks will be taken away."""
    global announced
    announced = True


def preempted() -> bool:
    """Return, in a rank, whether a node of the cluster is about to be taken away. All ranks have to call it.

    All of them get the same answer, at the same step of a loop: time for a snapshot. Then go on; once the node is gone,
    `restarts=` starts the function again. `fit(..., snapshots=...)` does so by itself. The notice is that Ray drains a
    node, as managers of clusters let it before they take a machine, and as `ray start --block` does at a SIGTERM.

    Costs a collective on a cluster, and nothing on one machine, where it is always False.

    Examples:
        >>> from nbdist import in_ddp, preempted
        >>> def train(steps):
        ...     saved = []
        ...     for step in range(steps):
        ...         if preempted() and not saved:
        ...             saved.append(step)  # save a snapshot here
        ...     return saved
        >>> in_ddp(2, train, 3)
        []
    """
    if NOTICES not in os.environ:
        return False
    import torch
    import torch.distributed as dist

    from ..devices import collective_device

    if not dist.is_initialized():
        return announced
    cpu = "cpu:" in dist.get_backend_config()  # where it can be, no GPU has to wait for this
    anybody = torch.tensor(int(announced), device="cpu" if cpu else collective_device())
    dist.all_reduce(anybody, op=dist.ReduceOp.MAX)
    return bool(anybody.item())

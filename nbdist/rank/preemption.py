"""Preemption: the notice that a machine of the ranks is about to be taken away. All ranks ask for it together."""

from __future__ import annotations

import os

from ..wire.messages import NOTICES

#: True once this rank has received the notice.
announced = False


def announce() -> None:
    """Record that a machine of the ranks will be taken away."""
    global announced
    announced = True


def preempted() -> bool:
    """Return, in a rank, whether a node of the cluster is about to be taken away. All ranks must call it.

    All ranks get the same answer, at the same step of a loop: save a snapshot then, and continue. When the node has
    ended, `restarts=` starts the function again. `fit(..., snapshots=...)` does this by itself. The notice comes from
    Ray when it drains a node: managers of clusters make it do so before they take a machine, and `ray start --block`
    does so at SIGTERM.

    On a cluster, each call is a collective. On one machine, it takes no time, since the answer is always False.

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

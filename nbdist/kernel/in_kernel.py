"""Functions that run in the kernel itself as in a rank, for `%debug` and breakpoints."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..capture.need import given_names
from ..capture.per_rank import for_each_rank, own
from ..devices import choose_backend, choose_devices
from ..fastai.patches import patched
from ..rank.call import checked
from ..rank.member import member
from ..wire.messages import Slot, World
from ..wire.rendezvous import LOOPBACK_INTERFACE, Rendezvous, open_store
from .calls.arguments import check_call

T = TypeVar("T")


def run_in_kernel(fn: Callable[..., T], args: Any, kwargs: Any, imports: Any, need: Any, checks: Sequence[str]) -> T:
    """Run a function in a process group of this process alone, with checks as `numerics.call` takes them."""
    block, names = check_call(fn, imports, need)
    args, kwargs = for_each_rank(args, kwargs, 1)
    args, kwargs = [own(value, 0) for value in args], {name: own(value, 0) for name, value in kwargs.items()}
    with given_names(block, names), _group_of_one(), patched(), breakpoints(), checked(checks):
        return fn(*args, **kwargs)


@contextlib.contextmanager
def breakpoints() -> Iterator[None]:
    """Make `breakpoint()` open pdb, or what PYTHONBREAKPOINT names. In a kernel, it would open the front end's
    debugger, or do nothing without one. `ray.init` sets the variable to a debugger that waits for a front end of Ray.
    """
    hook, debugpy = sys.breakpointhook, sys.modules.get("debugpy")
    if debugpy is not None and not debugpy.is_client_connected():
        sys.breakpointhook = sys.__breakpointhook__
    if sys.breakpointhook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        sys.breakpointhook = pdb.set_trace
    try:
        yield
    finally:
        sys.breakpointhook = hook


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """Join a process group of this process alone, with the environment of a rank. Afterwards, leave it and restore the
    environment."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # the user's own: it is as good
        yield
        return
    device = choose_devices(1, None)[0]
    if device != "cpu":  # the one that the notebook works with
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else device
    with contextlib.closing(Rendezvous()) as rendezvous:
        world = World(
            rank=0,
            world_size=1,
            device=device,
            visible="" if device == "cpu" else None,
            backend=choose_backend([device], None)[0],
            slot=Slot(0, 0, 1, LOOPBACK_INTERFACE, torch.get_num_threads(), ()),
            rendezvous=rendezvous.address,
            threads=torch.get_num_threads(),
        )
        with member(world, lambda: open_store(0, 1, rendezvous.address, ())):
            yield

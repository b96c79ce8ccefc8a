"""Temporary membership in a process group other than the session's: of the kernel, or of ranks that help it."""

from __future__ import annotations

import contextlib
import inspect
import os
import pdb
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..replay import target
from ..replay.target import Reached, Target, aiming_at
from ..wire.messages import Slot, World
from ..wire.rendezvous import INTERFACE_VARIABLES, LOOPBACK_INTERFACE, RendezvousAddress
from . import world as worlds
from .own_groups import OwnGroups


@contextlib.contextmanager
def member(world: World, open_store: Callable[[], Any]) -> Iterator[None]:
    """Join a process group with a rank's environment and threads. Afterwards, leave it and restore these."""
    import torch
    import torch.distributed as dist

    environ, own_groups, threads, hook = dict(os.environ), OwnGroups(), torch.get_num_threads(), sys.excepthook
    for name in INTERFACE_VARIABLES:  # the group connects processes of this machine alone
        os.environ.pop(name, None)
    os.environ.update(worlds.environ(world))
    try:
        store = open_store()
        own_groups.install()
        group = worlds.join(world, store)
        own_groups.enter(world, store)
        torchrec = sys.modules.get("torchrec.distributed.collective_utils")
        if torchrec is not None:  # what it has agreed upon in an earlier group, some members of this one do not know
            vars(torchrec)["_INITIALIZED"] = False
        yield
    finally:
        own_groups.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(threads)
        sys.excepthook = hook  # torch's writes the rank before each line of a traceback
    del group, store, own_groups


def cpu_world(rank: int, size: int, threads: int, address: RendezvousAddress, timeout: float) -> World:
    """Return the description of a CPU rank among `size` ranks on this machine, with a limit of `timeout` seconds
    for collectives.
    """
    slot = Slot(0, rank, size, LOOPBACK_INTERFACE, threads, ())
    return World(rank, size, "cpu", "gloo", slot, address, threads, options={"timeout": timeout})


class Way(NamedTuple):
    """The step of a replay, and the seeds of its ranks."""

    target: Target
    seeds: Sequence[Sequence[int] | None]
    """The seeds of each rank in the recorded call."""


class Beside(NamedTuple):
    """The process group in which the kernel takes the place of one rank."""

    rank: int
    """The number of the rank that the kernel replaces: this rank itself does nothing."""
    file: str
    """The path of the file at which the group meets."""
    threads: int
    address: RendezvousAddress
    timeout: float


def run_to(
    way: Way, rank: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Reached | None:
    """Run a function with a training in it up to a step of a recording. Return None if the function ended before this
    step."""
    seeds = way.seeds[rank]
    if seeds is not None:
        worlds.seed_everything(seeds)
    with aiming_at(way.target), warnings.catch_warnings():
        # Epochs before the step have no batches.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
        try:
            fn(*args, **kwargs)
        except Reached as reached:
            return reached.with_traceback(None)
        return Reached() if target.begun else None


def run_to_in_rank(way: Way, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    """Call `run_to` in a rank; return whether the step was reached."""
    _ignore_breakpoints()
    return run_to(way, int(os.environ["RANK"]), fn, args, kwargs) is not None


def run_beside(beside: Beside, way: Way, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Call `run_to` in a rank, in a process group in which the kernel replaces one of the ranks."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == beside.rank:
        return
    _ignore_breakpoints()
    inspect.unwrap(dist.destroy_process_group)()  # what `frameworks` replaces spares the group
    world = cpu_world(rank, size, beside.threads, beside.address, beside.timeout)
    with member(world, lambda: dist.FileStore(beside.file, size)):
        run_to(way, rank, fn, args, kwargs)


def _ignore_breakpoints() -> None:
    """Leave breakpoints to the kernel, in a rank that exists only to help it."""

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    sys.breakpointhook = pdb.set_trace = ignore

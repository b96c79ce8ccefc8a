"""A rank's place in the job: environment, device, threads, seeds, and process group."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..errors import NbdistError
from ..system import visible_devices
from ..system.connections import Address, cut_off
from ..system.limits import allow_open_files
from ..system.search_path import StandardFinder
from ..wire.messages import Setting, World
from ..wire.rendezvous import INTERFACE_VARIABLES, open_store
from . import nccl, threads
from .frameworks import forget_groups
from .own_groups import OwnGroups

#: The variable with which gloo (torch 2.8 or newer) connects ranks at their first exchange.
LATE = "TORCH_GLOO_LAZY_INIT"
#: Ranks from which on that is so unless the user says otherwise: connecting each with every other takes seconds then.
MANY = 128
#: Seconds that process groups may take to be left.
PATIENCE_TO_LEAVE = 5.0
#: Seconds that a released process group may take to end, before it is left to itself.
_PATIENCE_TO_END = 1.0
_NOTICE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*\n")


def enter_setting(setting: Setting) -> None:
    """Adopt the kernel's environment, folder, module path and arguments."""
    adopt(setting.environ)
    if hasattr(time, "tzset"):
        time.tzset()  # of the environment's TZ
    os.chdir(setting.cwd)
    sys.path[:] = setting.path
    if setting.standard:
        sys.meta_path.insert(0, StandardFinder(setting.standard))
    sys.argv[:] = setting.argv


def adopt(environ: Mapping[str, str]) -> None:
    """Replace the environment."""
    # Only what differs: most comes from the server, and would be copied page by page.
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})


def take_share(count: int) -> None:
    """Limit numeric libraries to `count` threads, in a process that is not a rank."""
    os.environ.update(threads.variables(count))
    threads.resize_pools(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def environ(world: World) -> dict[str, str]:
    """Return the variables that torchrun would set for this rank, and the variables that restrict its sockets to its
    network."""
    slot = world.slot
    variables = {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(slot.local_rank),
        "GROUP_RANK": str(slot.node),
        "NODE_RANK": str(slot.node),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(slot.local_world_size),
        "TORCHELASTIC_RUN_ID": "nbdist",  # by which Lightning knows that the ranks are there already
        **world.rendezvous.environ(),
        **threads.variables(world.threads),
    }
    if slot.interface:
        for name in INTERFACE_VARIABLES:
            variables[name] = os.environ.get(name, slot.interface)
    if world.world_size >= MANY:
        variables[LATE] = os.environ.get(LATE, "1")
    variables |= nccl.environ(world)
    if world.visible is not None:
        variables |= visible_devices.variables(world.visible)
    if world.device == "cpu":
        # Accelerate (and so fastai) takes CPU ranks for single processes without this variable.
        variables["ACCELERATE_USE_CPU"] = "true"
    elif world.device.startswith("cuda:") and world.device != f"cuda:{slot.local_rank}":
        # Of ranks that share a GPU each sees nothing but that one. Accelerate would have DDP take cuda:{LOCAL_RANK}.
        variables["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    return variables


def join(world: World, store: Any) -> Any:
    """Choose the device and the threads, and join the process group that meets at `store`. Returns the group."""
    import torch
    import torch.distributed as dist

    allow_open_files(8 * world.world_size)  # each group of gloo connects a rank with every other
    if world.cores is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a sandbox refuses it: the rank is slower there
            os.sched_setaffinity(0, world.cores)
    torch.set_num_threads(world.threads)
    options = dict(world.options)
    if "timeout" in options:
        options["timeout"] = timedelta(seconds=options["timeout"])
    if world.device.startswith("cuda"):
        device = torch.device(f"cuda:{world.slot.local_rank}" if world.device == "cuda" else world.device)
        torch.cuda.set_device(device)
        if "nccl" in world.backend and world.world_size > 1:
            # Connects the ranks now, which takes a third of a second: a rank that waits for the others in its first
            # collective, until NCCL has connected them, could not be released.
            options.setdefault("device_id", device)
    group_store = dist.PrefixStore("nbdist", store)
    with without_notice() if gloo_announces(torch.__version__) else contextlib.nullcontext():
        dist.init_process_group(
            world.backend, store=group_store, rank=world.rank, world_size=world.world_size, **options
        )
        if os.environ.get(LATE, "0") != "0" and "gloo" in dist.get_backend():
            # Connects each rank with those one, two, four and so on away, which is who most collectives speak to. A
            # rank that waits for one with which it was never connected would not notice that this one fails.
            dist.barrier()
    return dist.group.WORLD


def process_groups() -> dict[Any, str]:
    """Return the process groups of this rank, with their names."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return {} if c10d is None else dict(c10d._world.pg_names)


def abort(groups: Mapping[Any, str], peers: Sequence[Address]) -> None:
    """Abort, from any thread, the operations of this rank's process groups: they fail, or return without a result.

    A rank that waits in NCCL, or for a result from NCCL, does not react to signals, and does not notice that another
    rank has left.

    Args:
        groups: The process groups, with their names.
        peers: The other ranks' ends of the connections to this one, at which gloo waits.
    """
    cut_off(peers)
    with contextlib.ExitStack() as together:
        backend = _nccl_backend()
        if backend is not None:  # communicators that are aborted one by one may wait for each other
            backend._group_start()  # https://github.com/pytorch/pytorch/issues/119797
            together.callback(backend._group_end)
        for group in sorted(groups, key=lambda group: groups[group], reverse=True):
            nccl.abort(group)


def _nccl_backend() -> Any:
    """Return the NCCL backend of the default process group; None without NCCL."""
    dist = sys.modules.get("torch.distributed")
    return nccl.backend_of(dist.group.WORLD) if dist is not None and dist.is_initialized() else None


def _destroy_groups() -> None:
    import torch.distributed as dist

    abort(process_groups(), ())  # what is still queued on the GPU will never be done
    inspect.unwrap(dist.destroy_process_group)()  # what `frameworks` replaces spares the group


def destroy_in_background(held: list[Any]) -> None:
    """Empty a list with the last references to the process groups of a failed call, in a background thread.

    Destroying a group waits for gloo's threads. If the peer of a transfer leaves at the wrong moment, gloo does not
    wake its own thread, which then waits for half an hour. Therefore a background thread destroys the group, and the
    main thread waits at most `_PATIENCE_TO_END` seconds for it.
    """
    thread = threading.Thread(target=_end, args=(held,), name="nbdist: end of a group", daemon=True)
    thread.start()
    thread.join(_PATIENCE_TO_END)


def _end(held: list[Any]) -> None:
    held.clear()
    gc.collect()


def gloo_announces(torch_version: str) -> bool:
    """Return whether this version of torch lets gloo print to standard output when a rank has connected to the
    others.
    """
    major, minor = torch_version.split(".")[:2]
    return (2, 7) <= (int(major), int(minor)) < (2, 11)


@contextlib.contextmanager
def without_notice() -> Iterator[None]:
    """Keep gloo's notices of connections out of the cell; other output in this block comes at its end."""
    try:
        own = os.dup(1)
    except OSError:  # closed by the user's function
        yield
        return
    with tempfile.TemporaryFile(buffering=0) as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(own, 1)
            os.close(own)
            file.seek(0)
            rest = _NOTICE.sub(b"", file.read())
            while rest:
                rest = rest[os.write(1, rest) :]


#: The variables that say which rank this is.
_NUMBERS = frozenset(["RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])


class Membership:
    """The current process group of this rank, and its store."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the process group, as in `World`."""
        self._environ: Mapping[str, str] = {}
        self._leaving: threading.Thread | None = None
        self._fds: list[int] = []  # the descriptors of the store
        self.kept: Any = None
        """The store and the group. The group must not be sent with a model under DDP after the function has destroyed
        it, as scripts do at their end: destroying it waits with the GIL for gloo's threads, which wait for the GIL."""
        # The stores of all groups. Last of all, a `FileStore` writes into its file and reads it. That file is the
        # next group's (see `join`) if somebody kept the group until then: it would misread it, and might never end.
        self._file_stores: list[Any] = []
        self._own_groups = OwnGroups()

    def join(self, world: World, fds: list[int]) -> None:
        """Leave the current process group, and join the group of `world`."""
        self.number = world.group
        self.leave()
        if self._leaving is not None and self._leaving.is_alive():
            raise NbdistError(
                f"rank {world.rank} could not leave its process group within {PATIENCE_TO_LEAVE:g} s: something in it "
                f"does not end, such as a kernel on the GPU. The next call starts fresh ranks"
            )
        listening = [fds.pop()] if world.rank == 0 and world.rendezvous.store_port else []
        for old, new in zip(self._fds, fds, strict=False):
            # In the place of the old ones: a store that somebody still holds must not write to some other file.
            os.dup2(new, old, inheritable=False)
            os.close(new)
        self._fds = self._fds or fds
        self._environ = environ(world)
        os.environ.update(self._environ)
        threads.resize_pools(world.threads)
        try:
            store = open_store(world.rank, world.world_size, world.rendezvous, [*self._fds, *listening])
        finally:
            for fd in listening:
                os.close(fd)
        if not world.rendezvous.store_port:
            self._file_stores.append(store)
        self._own_groups.install()
        self.kept = store, join(world, store)
        self._own_groups.enter(world, store)

    def restore_environ(self) -> None:
        """Restore the variables that a call has removed, as some libraries do, and the numbers of ranks that it has
        changed."""
        for name, value in self._environ.items():
            if os.environ.get(name) != value and (name in _NUMBERS or name not in os.environ):
                os.environ[name] = value

    def is_in(self) -> bool:
        """Return whether the current process group is still the one that was joined."""
        return self.kept is not None and sys.modules["torch.distributed"].group.WORLD is self.kept[1]

    def leave(self, peers: Sequence[Address] = ()) -> None:
        """Leave all process groups, so that ranks that wait for this rank fail now. If leaving is impossible, the next
        `join` raises.

        `peers` are the other ranks' ends of this rank's connections.
        """
        dist = sys.modules.get("torch.distributed")
        joined = dist is not None and dist.is_initialized()
        if not joined and self.kept is None:
            return
        cut_off(peers)
        held = [self.kept, process_groups(), self._own_groups.leave()]
        self.kept = None
        if joined:
            if self._leaving is None or not self._leaving.is_alive():
                self._leaving = threading.Thread(target=_destroy_groups, name="nbdist: leave", daemon=True)
                self._leaving.start()
            self._leaving.join(PATIENCE_TO_LEAVE)
        elif dist is not None:
            forget_groups(dist.distributed_c10d)
        destroy_in_background(held)


def seed_everything(seeds: Sequence[int]) -> None:
    """Seed `random`, and NumPy and torch if they are loaded, each with its own seed."""
    for_random, for_numpy, for_torch = seeds
    random.seed(for_random)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(for_numpy % 2**32)
    torch = sys.modules.get("torch")
    if torch is None:  # in a process that is no rank
        return
    # torch.manual_seed takes three milliseconds to remember where it was called from, for a CUDA that is not there.
    seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed_torch(for_torch)

"""The ranks of a session as the kernel holds them: one process group, made again after a failure, until their end."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import affinity, engines, meeting, relay, worker
from .engines import local
from .errors import RankDied


@dataclass(frozen=True)
class Layout:
    """What ranks are started with."""

    devices: Sequence[str]
    """One for each rank."""
    backend: str
    options: Mapping[str, Any]
    """Further arguments of `init_process_group`."""
    threads: int | str | None
    """Threads for each rank; None shares the cores out, "bind" also binds the ranks to their shares."""
    env: Mapping[str, str]
    seed: int | None


class Doing(NamedTuple):
    """What a rank is doing: its state in a word, the name of the function, since when (seconds since the epoch)."""

    state: str
    what: str
    since: float


class Group:
    """Running ranks. Dropping the last reference to it ends them."""

    def __init__(self, engine: engines.Engine, layout: Layout) -> None:
        self._layout = layout
        self.ranks = engine.start(len(layout.devices))
        self.relay = relay.Relay(self.ranks.outputs)
        self._end = weakref.finalize(self, self.ranks.close)
        self._setting: worker.Setting | None = worker.Setting.of_this_process(layout.env)
        self._joined = False
        self.doing = [Doing("idle", "", time.time()) for _ in layout.devices]
        self.raised: list[int] = []
        """The ranks in which the last call raised, first the one whose exception the call raised."""
        self.dead = ""
        """Which rank has died first, and how; empty while all live."""

    def note(self, rank: int, state: str, what: str = "") -> None:
        """Keep in mind what a rank is doing from now on."""
        self.doing[rank] = Doing(state, what, time.time())

    def join(self) -> None:
        """Let the ranks enter a process group, unless they are in a good one."""
        if self._joined:
            return
        layout, size = self._layout, len(self._layout.devices)
        cores = affinity.usable_cores()
        bound = affinity.shares(cores, affinity.numa_nodes(), size) if layout.threads == "bind" else None
        threads = self._threads(len(cores))
        seeds = None if layout.seed is None or self._setting is None else (layout.seed,) * 3
        with contextlib.closing(meeting.MeetingPoint()) as meeting_point:
            for rank, device in enumerate(layout.devices):
                world = worker.World(
                    rank=rank,
                    world_size=size,
                    device=device,
                    backend=layout.backend,
                    options=layout.options,
                    master_port=meeting_point.port,
                    threads=threads,
                    cores=None if bound is None else bound[rank],
                )
                self.send(rank, "join", world, self._setting, seeds, fds=meeting_point.fds(rank))
        self._setting, self._joined = None, True

    def _threads(self, cores: int) -> int:
        if isinstance(self._layout.threads, int):
            return self._layout.threads
        environ = {**os.environ, **self._layout.env}
        asked = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has a number for each nesting level
        return int(asked) if asked.isdigit() else max(1, cores // len(self._layout.devices))

    def leave(self) -> None:
        """The process group is broken: before the next call the ranks enter another."""
        self._joined = False

    def send(self, rank: int, *message: Any, **parts: Any) -> None:
        """Send a rank a message. That it is dead is noticed when its answer is waited for."""
        with contextlib.suppress(ConnectionError):
            self.ranks.channels[rank].send(message, **parts)

    def bury(self, exit: engines.Exit) -> RankDied:
        """Keep in mind that a rank has died, and how."""
        self.relay.drain(exit.rank)
        died = RankDied(exit.rank, self.ranks.pids[exit.rank], exit.status, self.relay.logs[exit.rank].tail())
        self.dead = self.dead or str(died).partition("\n")[0]
        self.note(exit.rank, "dead")
        return died

    def end(self, grace: float) -> None:
        """Let the ranks leave, kill after `grace` seconds those that have not."""
        if self._end.detach() is not None:
            self.ranks.close(grace)


def choose_devices(nranks: int, devices: str | Sequence[str] | None) -> list[str]:
    """A device for each rank. Raises `ValueError` where there are not enough."""
    if devices == "cpu":
        return ["cpu"] * nranks
    if devices is not None and not isinstance(devices, str):
        if len(devices) != nranks:
            raise ValueError(f"devices={list(devices)!r} names {len(devices)} devices for {nranks} ranks")
        return [str(device) for device in devices]
    if devices not in (None, "cuda"):
        raise ValueError(f"devices={devices!r}: 'cpu', 'cuda', or a list with one device for each rank")
    gpus = local.visible_gpus()
    if gpus == 0 and devices is None:
        return ["cpu"] * nranks
    if nranks > gpus:
        raise ValueError(
            f"{nranks} ranks want a GPU each, but {gpus} GPU{'s are' if gpus != 1 else ' is'} visible. Ask for "
            f'{gpus or 1} or fewer, or for CPU ranks: Session({nranks}, devices="cpu").run(fn, ...)'
        )
    return [f"cuda:{rank}" for rank in range(nranks)]

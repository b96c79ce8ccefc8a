"""The ranks of a session as the kernel holds them: one process group, made again after a failure, until their end."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import engines, relay, worker
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

    def __init__(self, engine: engines.Engine, layout: Layout, cell: relay.Cell) -> None:
        self._layout = layout
        self.ranks = engine.start(len(layout.devices), cell.notice)
        self.relay = relay.Relay(self.ranks.outputs)
        self._end = weakref.finalize(self, self.ranks.close)
        self._fresh = True
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
        layout = self._layout
        environ = {**self.ranks.inherited(), **layout.env}
        seeds = None if layout.seed is None or not self._fresh else (layout.seed,) * 3
        with contextlib.closing(self.ranks.meet()) as meeting_point:
            for rank, (device, place) in enumerate(zip(layout.devices, self.ranks.places, strict=True)):
                world = worker.World(
                    rank=rank,
                    world_size=len(layout.devices),
                    device=device,
                    backend=layout.backend,
                    options=layout.options,
                    place=place,
                    meeting=meeting_point.meeting,
                    threads=self._threads(place.threads, environ),
                    cores=place.cores if layout.threads == "bind" else None,
                )
                setting = self.ranks.setting(rank, environ) if self._fresh else None
                self.send(rank, "join", world, setting, seeds, fds=meeting_point.fds(rank))
        self._fresh, self._joined = False, True

    def _threads(self, share: int, environ: Mapping[str, str]) -> int:
        if isinstance(self._layout.threads, int):
            return self._layout.threads
        asked = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has a number for each nesting level
        return int(asked) if asked.isdigit() else share

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
        died = RankDied(
            exit.rank, self.ranks.pids[exit.rank], exit.status, self.relay.logs[exit.rank].tail(), exit.reason
        )
        self.dead = self.dead or str(died).partition("\n")[0]
        self.note(exit.rank, "dead")
        return died

    def end(self, grace: float) -> None:
        """Let the ranks leave, kill after `grace` seconds those that have not."""
        if self._end.detach() is not None:
            self.ranks.close(grace)

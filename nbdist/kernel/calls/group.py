"""The running ranks of a session, as the kernel sees them: starting, their process group, their state, their end."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...devices import own_gpus, place_ranks, shared
from ...engines import warm_ranks
from ...engines.contract import Engine, Exit, OpenRendezvous, Ranks
from ...errors import NbdistError, RankDied, RankTimeout
from ...rank.threads import number
from ...system.cores import near
from ...system.ending import before_servers
from ...system.gpus import local_cores
from ...system.interrupts import deferred_interrupts
from ...wire.log import KEPT
from ...wire.messages import World
from ...wire.protocol import Join, ToRank
from ...wire.recording import Recording
from ..cell.cell import Cell
from ..cell.comms import Comms
from ..cell.relay import Relay
from . import stacks
from .gpu_errors import explain_gpu_error, explain_missing_gpu

#: Seconds that ranks get for a regular exit, with `atexit` functions and open files, before they are killed.
GRACE_TO_LEAVE = 5.0


#: Characters of the end of a log that are searched for its last line.
_LAST_LINE = 1000

#: The number of ranks whose memory is measured at each look: the system goes through all their pages for this.
MEMORY_AT_ONCE = 16


@dataclass(frozen=True)
class Layout:
    """The devices and options with which ranks are started."""

    devices: Sequence[str]
    """The device of each rank."""
    backend: str
    options: Mapping[str, Any]
    """Further arguments of `init_process_group`."""
    threads: int | str | None
    """Threads of each rank. None: the cores divided by the ranks. "bind": also binds each rank to its cores."""
    env: Mapping[str, str]
    seed: int | None
    seed_ranks: bool = False
    """True if each rank adds its number to the seeds."""
    visible: Sequence[str] | None = None
    """The GPUs that the ranks may use, as `devices.visible_entries` returns them: a session keeps those with which it
    was made. None: all."""
    notice: str = ""
    """A notice to show in the cell when ranks are started."""

    def gpus(self) -> list[str]:
        """Return each rank's entry in CUDA_VISIBLE_DEVICES; an empty list for CPU ranks and ranks of a cluster."""
        if self.devices[0] in ("cpu", "cuda"):
            return []
        return own_gpus(self.devices, self.visible)

    def seeds(self, rank: int, seeds: Sequence[int] | None) -> Sequence[int] | None:
        """Return the seeds of one rank."""
        return [seed + rank for seed in seeds] if seeds is not None and self.seed_ranks else seeds


class Doing(NamedTuple):
    """The state of a rank in one word, the name of the function, and the time at which the state began (seconds since
    1970).
    """

    state: str
    what: str
    since: float


class Group:
    """Running ranks. They end when the last reference to this object is dropped.

    Attributes:
        layout: The layout of the running ranks. With `least`, it may have fewer ranks than the requested layout.
        number: The number of their last process group, from 1.
        recording: The records of their collectives; None for ranks on other machines.
    """

    def __init__(self, engine: Engine, layout: Layout, cell: Cell, least: int | None = None) -> None:
        places = place_ranks(layout.devices, layout.visible)
        waiting = warm_ranks.take(engine, places, layout.env)
        self.ranks: Ranks = waiting or engine.start(len(layout.devices), cell.notice, least)
        with deferred_interrupts():  # until `_end` is registered, which ends the ranks
            self.layout = layout = replace(layout, devices=layout.devices[: len(self.ranks.pids)])
            self.relay = Relay(self.ranks)
            self.recording = Recording(len(self.ranks.pids)) if self.ranks.takes_descriptors else None
            self._fresh = True
            self._joined = False
            self.number = 0
            self.doing = [Doing("idle", "", time.time()) for _ in layout.devices]
            self._end = weakref.finalize(self, _leave, self.ranks, self.doing, self.relay.comms)
            before_servers(self._end)
            self.underway = False
            """True while a call has been sent, or a part of it, and may still run."""
            self._memory: dict[int, int | None] = {}
            self._looked_at = 0  # the rank whose memory is measured next
            self.raised: list[int] = []
            """The ranks in which the last call raised an exception. The rank whose exception was raised in the kernel
            is first."""
            self.dead = ""
            """The first death: which rank, and why; empty while all ranks live."""

    def note(self, rank: int, state: str, what: str = "") -> None:
        """Store the new state of a rank."""
        self.doing[rank] = Doing(state, what, time.time())
        if state in ("raised", "dead"):
            self.relay.failed(rank)

    def join(self) -> None:
        """Make the ranks join a new process group, unless they are in a usable one."""
        if self._joined:
            return
        layout = self.layout
        environ = {**self.ranks.inherited(), **layout.env}
        self.number += 1
        seeds = None if layout.seed is None or not self._fresh else (layout.seed,) * 3
        with contextlib.closing(self._open_rendezvous()) as rendezvous, self.ranks.together():
            places = place_ranks(layout.devices, layout.visible)
            shares_gpu = bool(gpus := layout.gpus()) and shared(gpus)
            slots = self.ranks.slots
            cores = [slot.cores for slot in slots]
            if layout.threads == "bind" and gpus:
                cores = near(cores, [local_cores(gpu) for gpu in gpus])
            for rank, (place, slot) in enumerate(zip(places, slots, strict=True)):
                world = World(
                    rank=rank,
                    world_size=len(layout.devices),
                    device=place.device,
                    visible=place.visible,
                    backend=layout.backend,
                    options=layout.options,
                    slot=slot,
                    rendezvous=rendezvous.address,
                    threads=self._threads(slot.threads, environ),
                    cores=cores[rank] if layout.threads == "bind" else None,
                    shares_gpu=shares_gpu,
                    group=self.number,
                )
                setting = self.ranks.setting(rank, environ) if self._fresh else None
                fds = rendezvous.fds(rank)
                segment = None if self.recording is None else self.recording.segment
                message = Join(world, setting, layout.seeds(rank, seeds), recorded=segment is not None)
                self.send(rank, message, fds=fds if segment is None else [*fds, segment.fd])
        if self.recording is not None:
            self.recording.handed_over()
        self._fresh, self._joined = False, True

    def _open_rendezvous(self) -> OpenRendezvous:
        try:
            return self.ranks.rendezvous()
        except NbdistError:
            deaths = [self.record_death(exit) for exit in self.ranks.exits()]
            if deaths:  # the cause of the failure
                raise deaths[0] from None
            raise

    def _threads(self, share: int, environ: Mapping[str, str]) -> int:
        if isinstance(self.layout.threads, int):
            return self.layout.threads
        return number(environ, "OMP_NUM_THREADS", share)

    def memory(self) -> dict[int, int | None]:
        """Return the bytes of private memory of each rank. With many ranks most figures are from earlier calls."""
        size = len(self.doing)
        due = [
            (self._looked_at + step) % size for step in range(size if not self._memory else min(size, MEMORY_AT_ONCE))
        ]
        self._memory.update(self.ranks.memory(due))
        self._looked_at = (due[-1] + 1) % size
        return dict(self._memory)

    def leave(self) -> None:
        """Mark the process group as broken: the ranks join a new one before the next call."""
        self._joined = False

    def send(self, rank: int, message: ToRank, **parts: Any) -> None:
        """Send a message to a rank. A dead rank raises nothing here: its death is noticed during the wait.

        Raises `RankTimeout` if the rank reads nothing for as long as a call may last.
        """
        try:
            with contextlib.suppress(ConnectionError):
                self.ranks.send(rank, message, **parts)
        except BlockingIOError:
            where = stacks.report(stacks.take(self.ranks, [rank]))
            raise RankTimeout(f"a message was not sent within `timeout=`: rank {rank} reads nothing; {where}") from None

    def explain_gpu_error(self, rank: int, error: BaseException, *, lost: bool) -> list[str]:
        """Return lines to show under a rank's exception if a GPU caused it. `lost`: the rank cannot use its GPU now."""
        if self.layout.devices[0] == "cpu":
            return explain_missing_gpu(error, rank)
        self.relay.drain(rank)
        pids = {pid: other for other, pid in enumerate(self.ranks.pids) if pid is not None}
        gpus = self.layout.gpus()
        gpu = gpus[rank] if gpus else None
        log = self.log(rank)
        return explain_gpu_error(error, rank, self.layout.devices[rank], gpu, pids, log, lost=lost)

    def log(self, rank: int) -> str:
        """Return the last output of a rank, shown or not."""
        self._fetch_logs([rank], KEPT)
        return self.relay.logs[rank].text()

    def last_lines(self) -> list[str]:
        """Return the last line of output of each rank."""
        ranks = range(len(self.doing))
        fetched = self.ranks.logs(ranks, _LAST_LINE)
        texts = [fetched.get(rank) or self.relay.logs[rank].text(_LAST_LINE) for rank in ranks]
        return [text.splitlines()[-1] if text else "" for text in texts]

    def _fetch_logs(self, ranks: Sequence[int], most: int) -> None:
        """Fetch the output of ranks that their nodes keep."""
        for rank, text in self.ranks.logs(ranks, most).items():
            self.relay.logs[rank].replace(text)

    def record_death(self, exit: Exit) -> RankDied:
        """Store the death of a rank, and return the exception for it."""
        self.relay.drain(exit.rank)
        if not exit.reason:  # or its node may be lost
            self._fetch_logs([exit.rank], KEPT)
        tail = self.relay.logs[exit.rank].tail()
        died = RankDied(exit.rank, self.ranks.pids[exit.rank], exit.status, tail, exit.reason)
        self.dead = self.dead or str(died).partition("\n")[0]
        self.note(exit.rank, "dead")
        return died

    def end(self, grace: float) -> None:
        """Ask the ranks to exit, and kill those that are still running after `grace` seconds."""
        if self._end.detach() is not None:
            try:
                self.relay.comms.close()
            finally:  # after an interrupt, too
                self.relay.say_goodbye()
                self.ranks.close(grace, self.relay.take_last)
                self._fetch_logs(range(len(self.doing)), KEPT)
                with contextlib.suppress(Exception):  # the cell may not exist any more
                    self.relay.flush()
                if self.recording is not None:
                    self.recording.close()
                warm_ranks.refill()  # now that these ranks have left the GPUs


def _leave(ranks: Ranks, doing: Sequence[Doing], comms: Comms) -> None:
    """End ranks whose `Group` was dropped, or whose kernel ends."""
    with contextlib.suppress(Exception):  # a kernel that ends cannot show anything any more
        comms.close()
    ranks.close(0.0 if any(one.state == "running" for one in doing) else GRACE_TO_LEAVE)

"""The ranks of a session during its life: whether they run, why they ended, and which ranks replace them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from ...engines.contract import Engine
from ...errors import NbdistError
from ...wire.log import Log
from ..cell.cell import Cell
from ..cell.comms import Between
from ..collectives import Collectives
from ..status import Snapshot, look
from . import stacks
from .group import GRACE_TO_LEAVE, Group, Layout


class SessionRanks:
    """The ranks of a session, or the reason why there are none. Its methods must be called one at a time.

    Args:
        engine, layout: The source of ranks, and the devices and options to start them with.
        timeout: The longest time of a message to a rank, in seconds; None: no limit.
        keep_frames: Whether ranks keep the frames of a call that raised, until the next call.
        min_ranks: The number of ranks that is enough for a restart; None: all.
    """

    def __init__(
        self, engine: Engine, layout: Layout, *, timeout: float | None, keep_frames: bool, min_ranks: int | None
    ) -> None:
        self.wanted = layout
        """The layout that the session was made with. Fewer ranks may run."""
        self._engine, self._timeout, self._keep_frames, self.min_ranks = engine, timeout, keep_frames, min_ranks
        self._started = False
        self.group: Group | None = None
        self.logs: Sequence[Log] = []
        """The output of the current ranks, or of the last ones."""
        self._dead = ""  # the reason why calls are refused until `restart`; empty if they are not
        self._lost = ""  # the reason why the next call gets fresh ranks; empty if it does not
        self.closed = False
        self.between: Callable[[], Between | None] = lambda: None
        """A function that returns the handler of widget events between calls."""

    @property
    def layout(self) -> Layout:
        """The layout of the running ranks. If no ranks run, the layout that the session was made with."""
        group = self.group  # which another thread may end
        return self.wanted if group is None else group.layout

    def state(self) -> str:
        """Describe the state of the session in a few words."""
        if self.closed:
            return "closed"
        if self._dead:
            return f"{self._dead}; restart() starts fresh ranks"
        return "not started" if self.group is None else "running"

    def check_open(self) -> None:
        """Raise `NbdistError` in a closed session."""
        if self.closed:
            raise NbdistError("this session is closed; make a new one")

    def raised(self) -> list[int]:
        """Return the ranks whose frames are kept; the rank whose exception the last call raised comes first."""
        return list(self.group.raised) if self._keep_frames and self.group is not None else []

    def log(self, rank: int) -> str:
        """Return the last output of a rank. If the ranks have ended, return the output of the last rank with this
        number; empty if none was ever started.
        """
        group = self.group  # which another thread may end
        if group is not None:
            return group.log(rank)
        return self.logs[rank].text() if self.logs else ""

    def ready(self, cell: Cell, needed: int = 1) -> Group:
        """Return the running ranks. If no ranks run, start them, at least `needed` of them.

        Raises `RankDied` if a rank has died since the last call, and from then on `NbdistError` until `restart`.
        """
        if self._dead:
            raise NbdistError(
                f"the session has lost its ranks: {self._dead}. restart() starts fresh ones; what earlier calls left "
                f"in them is lost"
            )
        deaths = [] if self.group is None else [self.group.record_death(exit) for exit in self.group.ranks.exits()]
        if self.group is not None and deaths:
            self._dead = self.group.dead
            self._kill()
            raise deaths[0]
        if self.group is not None and self.group.underway:  # an interrupt ended the call outside `_wait_for`
            self._lost = "the last call was interrupted"
            self.end(grace=0.0)
        if self.group is None:
            if self.wanted.notice:
                cell.notice(self.wanted.notice)
            least = None  # the first start needs all ranks
            if self.min_ranks is not None and self._started:
                least = max(self.min_ranks, needed)
            self.group = Group(self._engine, self.wanted, cell, least)
            if self._timeout is not None:
                self.group.ranks.limit_sending(self._timeout)
            self._started = True
            self.logs = self.group.relay.logs
            self.group.relay.comms.between = self.between
            size, wanted = len(self.group.layout.devices), len(self.wanted.devices)
            if size < wanted:
                cell.notice(
                    f"{wanted} ranks were asked for and {size} could be started: the call goes on with {size}. The "
                    f"next restart asks for {wanted} again"
                )
        return self.group

    def end(self, grace: float) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.end(grace)

    def _kill(self) -> None:
        """End the ranks at once. A further interrupt is ignored, so that the first exception is the one raised."""
        with contextlib.suppress(KeyboardInterrupt):
            self.end(grace=0.0)

    def restart(self, cell: Cell) -> None:
        """End the ranks and start fresh ones. Works after the death of a rank, too."""
        self.end(GRACE_TO_LEAVE)
        self._dead = self._lost = ""
        self.ready(cell)  # they get environment and folder with their first call

    def look(self, busy: bool) -> Snapshot:
        """Return the table of the ranks; `busy`: a call runs, or waits for its turn."""
        state = self.state()
        if state == "not started" and busy:
            state = "starting"
        elif state == "running" and not busy:
            state = "idle"
        return look(state, self.layout, self.group, busy)

    def stacks(self) -> dict[int, list[stacks.Frame] | None]:
        """Return the stack of each rank, as `stacks.take` does; nothing without ranks."""
        group = self.group  # which another thread may end
        return {} if group is None else stacks.take(group.ranks)

    def collectives(self) -> Collectives:
        """Return the last collectives of each rank. Raises `NbdistError` without records of them."""
        group = self.group  # which another thread may end
        recording = None if group is None else group.recording
        if group is None or recording is None:
            raise NbdistError(
                "no collectives are recorded: the ranks have not started yet, or have ended"
                if group is None
                else "collectives are recorded where the ranks run on this machine, and not on a cluster"
            )
        return Collectives({rank: recording.read(rank) for rank in range(len(group.layout.devices))}, time.monotonic())

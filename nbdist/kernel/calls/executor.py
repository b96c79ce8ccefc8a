"""Run calls on ranks. Ranks start when a call needs them, and are replaced after a loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...capture.call import Call
from ...engines.contract import Engine
from ...errors import NbdistError, RankDied, RemoteTraceback
from ...system.interrupts import deferred_interrupts
from ...wire import protocol
from ...wire.log import Log
from ..cell.cell import Cell
from ..cell.comms import Between
from ..collectives import Collectives
from ..status import Snapshot, look
from . import stacks
from .futures import Stop
from .group import GRACE_TO_LEAVE, Group, Layout
from .keyboard import Keyboard
from .notices import how_to_look_inside
from .stopping import describe_exit, early_stop, ranks_named
from .waiting import Waiting


@dataclass(frozen=True)
class Request:
    """A captured call and the options for running it."""

    call: Call
    seeds: tuple[int, int, int] | None
    targets: Sequence[int] | None
    """The ranks that run the call; None: all ranks."""
    everyone: bool
    """True: all targets return their values. False: only the first one does."""
    output: str
    lines: int | None
    """The number of output lines that the cell shows in full; of more output it shows the last lines. None: all."""
    what: str
    """The name of the function, for messages."""
    once: bool = False
    """True if the ranks end after the call."""


class Executor:
    """The ranks of a session and their state. Its methods must be called one at a time.

    Args:
        engine, layout: The source of ranks, and the devices and options to start them with.
        timeout: The longest time of a call, in seconds; None: no limit.
        keep_frames: Whether ranks keep the frames of a call that raised, until the next call.
        restarts: The number of times that a call is repeated on fresh ranks after the loss of a rank or a node.
        on_hang: The option `on_hang` of `Waiting`.
        check: The field `check` of `protocol.Call`.
        min_ranks: The number of ranks that is enough for a restart; None: all.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        *,
        timeout: float | None,
        keep_frames: bool,
        restarts: int,
        on_hang: str = "say",
        check: Sequence[str] = (),
        min_ranks: int | None = None,
    ) -> None:
        self.wanted = layout
        """The layout that the session asks for; fewer ranks may run."""
        self._engine, self._timeout, self._keep_frames, self._restarts = engine, timeout, keep_frames, restarts
        self.min_ranks, self._check = min_ranks, check
        self.on_hang: str | None = on_hang
        """None: ranks that wait are not looked for, as they wait for the kernel."""
        self._started = False
        self.group: Group | None = None
        self.logs: Sequence[Log] = []
        """The output of the current, or last, ranks."""
        self._dead = ""  # the reason why calls are refused until `restart`; empty if they are not
        self._lost = ""  # the reason why the next call gets fresh ranks; empty if it does not
        self.closed = False
        self.between: Callable[[], Between | None] = lambda: None
        """Function that returns the handler of widget events between calls."""

    @property
    def layout(self) -> Layout:
        """The layout of the running ranks; without any, the layout that is wanted."""
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
        """Return the last text of a rank, or of the one that had its number last; empty before any has started."""
        group = self.group  # which another thread may end
        if group is not None:
            return group.log(rank)
        return self.logs[rank].text() if self.logs else ""

    def carry_out(self, request: Request, cell: Cell, stop: Stop | None = None) -> list[Any]:
        """Run a call, and repeat it after the loss of a rank. Returns the values of the ranks that answer."""
        for count in range(self._restarts):
            try:
                return self._attempt(request, cell, stop, count)
            except RankDied as died:
                if not self._dead:  # the function itself raised it
                    raise
                self._dead = self._lost = ""  # the notice below says it
                why = str(died).partition("\n")[0]
                cell.notice(
                    f"{why}. Starting again on fresh ranks ({count + 1} of {self._restarts} restarts); what earlier "
                    f"calls left in the old ones is lost"
                )
        return self._attempt(request, cell, stop, self._restarts)

    def _attempt(self, request: Request, cell: Cell, stop: Stop | None, count: int) -> list[Any]:
        """Send a call to its ranks and wait for their answers."""
        self.check_open()
        call, named = request.call, max(request.targets or [0])
        if self.group is not None and named >= (size := len(self.group.layout.devices)):
            raise NbdistError(
                f"rank {named} does not exist any more: {size} ranks were left after a restart (min_ranks=). "
                f"restart() asks for all ranks again"
            )
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(count), "TORCHELASTIC_MAX_RESTARTS": str(self._restarts)}
        try:
            group = self.ready(cell, needed=named + 1)
            targets = range(len(group.layout.devices)) if request.targets is None else request.targets
            first = targets[0]
            group.relay.begin(cell, request.output, first, request.lines)
            if self._lost:
                cell.notice(f"fresh ranks: {self._lost}, and what earlier calls left in them is lost")
                self._lost = ""
        except KeyboardInterrupt:
            raise early_stop(killed=self.group is None) from None

        check = [one for one in self._check if len(targets) == len(group.layout.devices) or one == "nan"]

        def send() -> None:
            group.join()
            group.raised.clear()
            with group.ranks.together():
                for place, rank in enumerate(targets):
                    answers = request.everyone or rank == first
                    seeds = self.layout.seeds(rank, request.seeds)
                    output = group.relay.number, group.relay.shows(rank), group.relay.lines
                    message = protocol.Call(
                        call.header, seeds, answers, self._keep_frames, place, restarts, *output, check
                    )
                    group.send(rank, message, parcel=call.parcel)

        about: dict[str, Any] = {"timeout": self._timeout, "on_hang": self.on_hang, "originals": call.originals}
        values = self._send_and_wait(group, send, targets, request.what, stop=stop, once=request.once, **about)
        return values if request.everyone else values[:1]

    def _send_and_wait(
        self, group: Group, send: Callable[[], None], targets: Iterable[int], what: str, **about: Any
    ) -> list[Any]:
        """Send messages to ranks and wait for their answers. An interrupt is deferred until all is sent."""
        waiting: Waiting | None = None
        interrupted = begun = False
        try:
            with deferred_interrupts():
                begun = group.underway = True
                send()
                waiting = Waiting(group, targets, what, **about)
        except BaseException as exc:
            interrupted = isinstance(exc, KeyboardInterrupt)
            if interrupted and not begun:
                raise early_stop(killed=False) from None
            if waiting is None:  # the ranks may have received one half of it
                self._lost = "the last call was interrupted while it was sent to the ranks"
                self._dead = group.dead
                self._kill()
                if interrupted:
                    raise early_stop(killed=True) from None
            if not interrupted:
                raise
        assert waiting is not None
        return self._wait_for(group, waiting, interrupted)

    def _wait_for(self, group: Group, waiting: Waiting, interrupted: bool) -> list[Any]:
        try:
            values = waiting.wait(interrupted)
            group.underway = False
            return values
        except BaseException as exc:
            if isinstance(exc, Exception) and isinstance(exc.__cause__, RemoteTraceback):
                exc.__cause__.inside = how_to_look_inside(self._keep_frames)
            if isinstance(exc, SystemExit):  # a notebook shows only its number, a script shows nothing
                group.relay.cell.notice(describe_exit(exc))
            if waiting.pending:
                self._lost = waiting.ended or f"{ranks_named(waiting.pending)} did not leave the last call"
                if self._keep_frames:
                    group.relay.cell.notice(f"no rank is held for post_mortem(): {self._lost}")
                self._kill()
            group.underway = False
            raise
        finally:
            if group.dead:
                self._dead = group.dead
                self._kill()

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

    def debug(self, rank: int, commands: Iterable[str] | None, cell: Cell, stop: Stop | None = None) -> None:
        """Open the debugger of a rank on the frames that it keeps, and return when the user leaves it.

        `commands` are the lines to type instead of the user; None asks the user.
        """
        group = self.group
        assert group is not None
        group.relay.begin(cell, "rank0", rank)

        def send() -> None:
            group.join()  # code that is typed there may use the process group
            group.send(rank, protocol.Debug())

        self._send_and_wait(group, send, [rank], "post_mortem", keyboard=Keyboard(group, commands), stop=stop)

    def deliver_widget_event(self, rank: int, event: dict[str, Any], buffers: Sequence[bytes], cell: Cell) -> None:
        """Send a change of a widget in the page to its rank, and show the output of the widget's callbacks."""
        group = self.group
        if group is not None and not self._dead:
            group.relay.begin(cell, "rank0", rank)
            message = protocol.Widget(event, buffers)
            self._send_and_wait(group, lambda: group.send(rank, message), [rank], "widget")

    def empty_cache(self, cell: Cell) -> None:
        """Free the unused GPU memory that torch caches in the ranks, if ranks run."""
        if self.group is None or self._dead:
            return
        group = self.ready(cell)
        group.relay.begin(cell, "rank0", 0)
        targets = range(len(self.layout.devices))

        def send() -> None:
            with group.ranks.together():
                for rank in targets:
                    group.send(rank, protocol.EmptyCache())

        self._send_and_wait(group, send, targets, "empty_cache")

    def restart(self, cell: Cell) -> None:
        """End the ranks and start fresh ones. Works after the death of a rank, too."""
        self.end(GRACE_TO_LEAVE)
        self._dead = self._lost = ""
        self.ready(cell)  # they get environment and folder with their first call

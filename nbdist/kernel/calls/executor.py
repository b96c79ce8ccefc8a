"""Carries out calls on ranks that are started when they are needed, and replaced when they are lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...capture.call import Call
from ...engines.contract import Engine
from ...errors import NbdistError, RankDied, RemoteTraceback
from ...notebook.shell import shell
from ...system.interrupts import postponed_interrupts
from ...wire import protocol
from ..cell.cell import Cell
from ..cell.comms import Between
from ..cell.relay import Log
from ..status import Snapshot, look
from . import stacks
from .futures import Stop
from .group import GRACE_TO_LEAVE, Group, Layout
from .keyboard import Keyboard
from .stopping import describe_exit, early_stop
from .waiting import Waiting


@dataclass(frozen=True)
class Request:
    """A call that has been captured, and how it is to be carried out."""

    call: Call
    seeds: tuple[int, int, int] | None
    targets: Sequence[int] | None
    """The ranks that run it; None: all that there are."""
    everyone: bool
    """Whether all ranks are to answer with their values, or only the first of the targets."""
    output: str
    lines: int | None
    """How many lines of output the cell shows before it shows the last ones only; None: all."""
    what: str
    once: bool = False
    """Whether the ranks end after it."""


class Executor:
    """The ranks of a session, and what became of them. Its calls must be made one at a time.

    Args:
        engine, layout: How ranks are started.
        timeout: Seconds that a call may take; None: any time.
        keep_frames: Whether ranks keep the frames of a call that raised, until the next call.
        restarts: How often a call is started again, on fresh ranks, after a rank or its node was lost.
        on_hang: As `Waiting` has it.
        min_ranks: How many ranks are enough then. None: all.
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
        min_ranks: int | None = None,
    ) -> None:
        self.wanted = layout
        """That of the ranks which are wanted: there may be fewer."""
        self._engine, self._timeout, self._keep_frames, self._restarts = engine, timeout, keep_frames, restarts
        self.min_ranks, self._on_hang = min_ranks, on_hang
        self._started = False
        self.group: Group | None = None
        self.logs: Sequence[Log] = []
        """Of the ranks that there are, or were last."""
        self._dead = ""  # why calls are refused until `restart`
        self._lost = ""  # why the next call has fresh ranks
        self.closed = False
        self.between: Callable[[], Between | None] = lambda: None
        """Gives what lets a widget's rank hear the page between calls."""

    @property
    def layout(self) -> Layout:
        """The layout of the running ranks; without any, the layout that is wanted."""
        group = self.group  # which another thread may end
        return self.wanted if group is None else group.layout

    def state(self) -> str:
        """Return the state of the session in a few words."""
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
        """The ranks whose frames are kept, first the one whose exception the last call raised."""
        return list(self.group.raised) if self._keep_frames and self.group is not None else []

    def carry_out(self, request: Request, cell: Cell, stop: Stop | None = None) -> list[Any]:
        """Do a call in its turn, and again after a rank was lost."""
        for count in range(self._restarts):
            try:
                return self._attempt(request, cell, stop, count)
            except RankDied as died:
                if not self._dead:  # the function itself raised it
                    raise
                self._dead = self._lost = ""  # said here
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
            raise NbdistError(f"there is no rank {named} any more: after a restart there are {size} (min_ranks=)")
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

        def send() -> None:
            group.join()
            group.raised.clear()
            with group.ranks.together():
                for place, rank in enumerate(targets):
                    answers = request.everyone or rank == first
                    seeds = self.layout.seeds(rank, request.seeds)
                    message = protocol.Call(call.header, seeds, answers, self._keep_frames, place, restarts)
                    group.send(rank, message, parcel=call.parcel)

        values = self._have_done(
            group,
            send,
            targets,
            request.what,
            timeout=self._timeout,
            originals=call.originals,
            stop=stop,
            once=request.once,
            on_hang=self._on_hang,
        )
        return values if request.everyone else values[:1]

    def _have_done(
        self, group: Group, send: Callable[[], None], targets: Iterable[int], what: str, **about: Any
    ) -> list[Any]:
        """Send ranks what they are to do, all of it also where an interrupt comes, and wait for their answers."""
        waiting: Waiting | None = None
        interrupted = begun = False
        try:
            with postponed_interrupts():
                begun = group.underway = True
                send()
                waiting = Waiting(group, targets, what, **about)
        except BaseException as exc:
            interrupted = isinstance(exc, KeyboardInterrupt)
            if interrupted and not begun:
                raise early_stop(killed=False) from None
            if waiting is None:  # they may have got half of it
                self._lost = "the last call was broken off while it was sent to the ranks"
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
                looks = "%debug or post_mortem() looks" if shell() is not None else "post_mortem() looks"
                looks = looks if self._keep_frames else f"hold_on_error=True, then {looks}"
                exc.__cause__.inside = f"{looks} inside"
            if isinstance(exc, SystemExit):  # of which the notebook shows the number alone, and a script nothing
                group.relay.cell.notice(describe_exit(exc))
            if waiting.pending:
                stuck = sorted(waiting.pending)
                who = " and ".join(f"rank {rank}" for rank in stuck) if len(stuck) < 5 else f"{len(stuck)} ranks"
                self._lost = waiting.ended or f"{who} did not leave the last call"
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
        """Return the running ranks; without any, start them: at least `needed`.

        Raises `RankDied` when it finds that one has died, and `NbdistError` from then on until `restart`.
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
        if self.group is not None and self.group.underway:  # an interrupt came where it was not expected
            self._lost = "the last call was broken off"
            self.end(grace=0.0)
        if self.group is None:
            if self.wanted.notice:
                cell.notice(self.wanted.notice)
            least = None  # the first time there have to be all
            if self.min_ranks is not None and self._started:
                least = max(self.min_ranks, needed)
            self.group = Group(self._engine, self.wanted, cell, least)
            self._started = True
            self.logs = self.group.relay.logs
            self.group.relay.comms.between = self.between
            size, wanted = len(self.group.layout.devices), len(self.wanted.devices)
            if size < wanted:
                cell.notice(
                    f"there is room for {size} of {wanted} ranks: these go on. The next restart asks for {wanted} again"
                )
        return self.group

    def end(self, grace: float) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.end(grace)

    def _kill(self) -> None:
        """End the ranks at once. A further press of the stop button does not hide why."""
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

    def debug(self, rank: int, commands: Iterable[str] | None, cell: Cell, stop: Stop | None = None) -> None:
        """Open the debugger of a rank on the frames that it keeps, until the user leaves."""
        group = self.group
        assert group is not None
        group.relay.begin(cell, "rank0", rank)

        def send() -> None:
            group.join()  # so that the user can ask it for its rank, and the like
            group.send(rank, protocol.Debug())

        self._have_done(group, send, [rank], "post_mortem", keyboard=Keyboard(group, commands), stop=stop)

    def hear_widget(self, rank: int, said: dict[str, Any], buffers: Sequence[bytes], cell: Cell) -> None:
        """Pass a change of a widget in the page to its rank, and show what follows from it."""
        group = self.group
        if group is not None and not self._dead:
            group.relay.begin(cell, "rank0", rank)
            message = protocol.Widget(said, buffers)
            self._have_done(group, lambda: group.send(rank, message), [rank], "widget")

    def empty_cache(self, cell: Cell) -> None:
        """Make the ranks, if there are any, give back free memory of their GPUs."""
        if self.group is None or self._dead:
            return
        group = self.ready(cell)
        group.relay.begin(cell, "rank0", 0)
        targets = range(len(self.layout.devices))

        def send() -> None:
            with group.ranks.together():
                for rank in targets:
                    group.send(rank, protocol.EmptyCache())

        self._have_done(group, send, targets, "empty_cache")

    def restart(self, cell: Cell) -> None:
        """End the ranks and start fresh ones, also after a rank has died."""
        self.end(GRACE_TO_LEAVE)
        self._dead = self._lost = ""
        self.ready(cell).join()

"""Run calls on ranks, and repeat them after the loss of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...capture.call import Call
from ...engines.contract import Engine
from ...errors import NbdistError, RankDied, RemoteTraceback
from ...system.interrupts import deferred_handlers
from ...wire import protocol
from ..cell.cell import Cell
from ..cell.relay import Relay
from .futures import Stop
from .group import Group, Layout
from .keyboard import Keyboard
from .notices import how_to_look_inside
from .session_ranks import SessionRanks
from .stopping import describe_exit, early_stop
from .waiting import Waiting


@dataclass(frozen=True)
class Request:
    """A captured call and the options for running it."""

    call: Call
    seeds: tuple[int, int, int] | None
    targets: Sequence[int] | None
    """The ranks that run the call. None: all ranks."""
    everyone: bool
    """True: all targets return their values. False: only the first one does."""
    output: str
    lines: int | None
    """The number of output lines that the cell shows in full; of more output it shows the last lines. None: all."""
    what: str
    """The name of the function, for messages."""
    once: bool = False
    """True if the ranks end after the call."""


class Executor(SessionRanks):
    """The ranks of a session, with the calls on them. Its methods must be called one at a time.

    Args:
        engine, layout, keep_frames, min_ranks: As for `SessionRanks`.
        timeout: The longest time of a call, in seconds; None: no limit.
        restarts: The number of times that a call is repeated on fresh ranks after the loss of a rank or a node.
        on_hang: The option `on_hang` of `Waiting`.
        check: The field `check` of `protocol.Call`.
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
        super().__init__(engine, layout, timeout=timeout, keep_frames=keep_frames, min_ranks=min_ranks)
        self._restarts, self._check = restarts, check
        self.on_hang: str | None = on_hang
        """The option `on_hang`. None: hangs are not looked for, because the ranks wait for the kernel."""

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
                    output = self._output_of(group.relay, rank)
                    message = protocol.Call(
                        call.header, seeds, answers, self._keep_frames, place, restarts, *output, check
                    )
                    group.send(rank, message, parcel=call.parcel)

        about: dict[str, Any] = {"timeout": self._timeout, "on_hang": self.on_hang, "originals": call.originals}
        values = self._send_and_wait(group, send, targets, request.what, stop=stop, once=request.once, **about)
        return values if request.everyone else values[:1]

    def _output_of(self, relay: Relay, rank: int) -> tuple[int, bool, int | None]:
        """Return the fields of `protocol.Call` that say which part of a rank's output its node sends."""
        return relay.number, relay.shows(rank), relay.lines

    def _send_and_wait(
        self, group: Group, send: Callable[[], None], targets: Iterable[int], what: str, **about: Any
    ) -> list[Any]:
        """Send messages to ranks and wait for their answers. Signal handlers are deferred until all is sent."""
        waiting: Waiting | None = None
        raised: BaseException | None = None
        begun = sent = False
        try:
            with deferred_handlers():
                begun = group.underway = True
                send()
                sent = True
                waiting = Waiting(group, targets, what, **about)
        except BaseException as exc:
            interrupted = isinstance(exc, KeyboardInterrupt)
            if interrupted and not begun:
                raise early_stop(killed=False) from None
            if not sent:  # the ranks may have received one half of it
                self._lost = "the last call was interrupted while it was sent to the ranks"
                self._dead = group.dead
                self._kill()
                if interrupted:
                    raise early_stop(killed=True) from None
                raise
            raised = exc
        if waiting is None:  # the handler of a signal has raised while it was made
            waiting = Waiting(group, targets, what, **about)
        try:
            return self._wait_for(group, waiting, raised)
        except BaseException as exc:
            if waiting.takes_interrupts:
                raise
            raised = exc
        return self._wait_for(group, waiting, raised)

    def _wait_for(self, group: Group, waiting: Waiting, raised: BaseException | None) -> list[Any]:
        try:
            values = waiting.wait(raised)
            group.underway = False
            return values
        except BaseException as exc:
            if not waiting.takes_interrupts:
                raise
            if isinstance(exc, Exception) and isinstance(exc.__cause__, RemoteTraceback):
                exc.__cause__.inside = how_to_look_inside(self._keep_frames)
            if isinstance(exc, SystemExit):  # a notebook shows only its number, a script shows nothing
                group.relay.cell.notice(describe_exit(exc))
            if waiting.pending:
                self._lost = waiting.why_lost()
                if self._keep_frames:
                    group.relay.cell.notice(f"no rank is held for post_mortem(): {self._lost}")
                self._kill()
            group.underway = False
            raise
        finally:
            if group.dead:
                self._dead = group.dead
                self._kill()

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

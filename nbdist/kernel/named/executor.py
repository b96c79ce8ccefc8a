"""The executor of a named session: the keeper runs the calls, and this process shows the journal in the cell."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...engines.origin import here
from ...errors import NbdistError
from ...notebook.shell import is_asked_to_end
from ...system.interrupts import deferred_interrupts
from ...wire.journal import Reader, Record
from ...wire.parcel import Parcel
from ...wire.session_folder import SessionFolder
from ..calls import stacks
from ..calls.executor import Request
from ..calls.futures import Stop
from ..calls.group import Layout
from ..calls.stopping import late_stop
from ..cell.cell import Cell
from ..cell.comms import Between
from ..collectives import Collectives
from ..status import Snapshot
from .connection import Connection, Wakeup, ended
from .outcomes import Originals, error_of, value_of
from .replaying import Relays, Replayer, follow
from .spec import Action, Spec

#: Seconds after an interrupt in which Jupyter may send the request to end the kernel.
_UNTIL_REQUEST = 0.5


class NamedExecutor:
    """The ranks of a keeper, with the methods of an `Executor`.

    Args:
        folder: The folder of the session.
        spec: The description of the session.
    """

    def __init__(self, folder: SessionFolder, spec: Spec) -> None:
        self.folder, self.closed = folder, False
        self.use(spec)
        self.connection = Connection(folder)
        self.between: Callable[[], Between | None] = lambda: None
        self.relays = Relays(self._deliver_widget_event, lambda: self.between())
        self.shown: dict[str, threading.Event] = {}
        """For each call that a thread shows, by its token: an event that is set when all of its output is shown."""
        self._raised: list[int] = []
        self._reader: Reader | None = None  # for all actions, one after the other: to find the end takes a while

    def use(self, spec: Spec) -> None:
        """Adopt the options of the session that the keeper holds."""
        self._wanted, self._sent = spec.layout, spec.origin
        self.min_ranks: int | None = spec.executor["min_ranks"]

    @property
    def layout(self) -> Layout:
        """The layout of the ranks. After a restart with `min_ranks=` there may be fewer ranks than were asked for."""
        count, wanted = self.relays.ranks, self._wanted
        return wanted if count in (0, len(wanted.devices)) else replace(wanted, devices=wanted.devices[:count])

    # ------------------------------------------------------------------------------------------- state and questions

    def state(self) -> str:
        if self.closed:
            return "closed"
        try:
            state, busy = self.connection.ask("state")
        except NbdistError:
            return "ended; replay() and result() give what the journal has" if self.folder.exists() else "closed"
        return "busy" if busy and state == "running" else str(state)

    def check_open(self) -> None:
        if self.closed or not self.connection.alive:
            raise NbdistError(ended(self.folder))

    def raised(self) -> list[int]:
        return self._raised

    def log(self, rank: int) -> str:
        if self.connection.alive:
            return str(self.connection.ask("log", rank))
        relay = self.relays.relay  # what this process has shown
        return "" if relay is None else relay.logs[rank].text()

    def stacks(self) -> dict[int, list[stacks.Frame] | None]:
        found: dict[int, list[stacks.Frame] | None] = self.connection.ask("stacks")
        return found

    def collectives(self) -> Collectives:
        found: Collectives = self.connection.ask("collectives")
        return found

    def look(self, busy: bool) -> Snapshot:
        try:
            found: Snapshot = self.connection.ask("status")
        except NbdistError as exc:
            return Snapshot(str(exc), [], False)
        return found

    # ---------------------------------------------------------------------------------------------------------- actions

    def carry_out(self, request: Request, cell: Cell, stop: Stop | None = None) -> list[Any]:
        call = request.call
        names = [(obj.__module__, obj.__qualname__) for obj in call.originals if hasattr(obj, "__qualname__")]
        action = Action(
            "call",
            request.what,
            asks=stop is None,
            output=request.output,
            lines=request.lines,
            header=call.header,
            cells=call.cells,
            seeds=request.seeds,
            targets=request.targets,
            everyone=request.everyone,
            once=request.once,
            originals=names if len(names) == len(call.originals) else [("", "")] * len(call.originals),
        )
        replayer = self._in_turn(action, cell, stop, call.parcel)
        return self.outcome(replayer, call.originals)  # the keeper counts it as taken: this process is there

    def _in_turn(self, action: Action, cell: Cell, stop: Stop | None = None, parcel: Parcel | None = None) -> Replayer:
        """Make the keeper run an action in its turn, and show the records of the action until its end."""
        token = secrets.token_hex(8)
        if self._reader is None:
            self._reader = Reader(self.folder.path, at_end=True)
        replayer: Replayer | None = None
        interrupted = False
        with self.connection.wakeup() as wakeup:
            while True:  # once more after an interrupt, which may come anywhere in the block
                try:
                    if replayer is None:
                        with deferred_interrupts():
                            self._send_origin()
                            name = "" if wakeup is None else wakeup.name
                            self.connection.send("action", token, name, *action, parcel=parcel)
                            replayer = Replayer(self.relays, self._reader, cell, lambda head: head["token"] == token)
                    self.follow(replayer, token, stop, wakeup, interrupted)
                    return replayer
                except KeyboardInterrupt as exc:
                    if replayer is None or replayer.over or interrupted or exc.args:
                        raise
                    interrupted = True

    def _send_origin(self) -> None:
        origin = here()
        if origin != self._sent:
            self.connection.send("origin", origin)
            self._sent = origin

    def follow(
        self, replayer: Replayer, token: str, stop: Stop | None, wakeup: Wakeup | None, interrupted: bool = False
    ) -> None:
        """Show a call, or another action, until its end.

        Args:
            replayer: The action.
            token: Its token.
            stop: The object by which another thread interrupts the action.
            wakeup: The source of wakeups when the journal has grown. None: the keeper has ended.
            interrupted: Whether an interrupt has come that was not passed on to the keeper.

        Raises:
            NbdistError: The keeper has ended before a call did.
            KeyboardInterrupt: An interrupt has come, and the action has ended without an exception.
        """
        stopped = False

        def answer(question: Record) -> None:
            line: str | None = None
            try:
                if stop is None:
                    line = Cell().ask(question.head["prompt"], question.head["hidden"])
            except EOFError:
                pass
            self.connection.send("line", token, line)

        def interrupt() -> None:
            nonlocal stopped
            ends, stopped = False, True
            with contextlib.suppress(KeyboardInterrupt):  # the second interrupt stops the call at once
                ends = stop is None and is_asked_to_end(_UNTIL_REQUEST)
            if ends:
                name = self.folder.name
                raise KeyboardInterrupt(f"this kernel ends, and the call goes on: attach({name!r}) gives its result")
            self.connection.send("stop", token)

        shown = self.shown.setdefault(token, threading.Event())
        try:
            if interrupted:
                interrupt()
            follow(replayer, wakeup, stop, token=token, asks=answer, on_interrupt=interrupt)
        finally:
            replayer.finish()
            self.shown.pop(token, None)
            shown.set()
        self.check_over(replayer)
        self.note_held(replayer)
        if stopped and replayer.raised is None:
            raise late_stop(replayer.head)

    def check_over(self, replayer: Replayer) -> None:
        """Raise `NbdistError` for a call if the keeper has ended before the call did."""
        if not replayer.over:
            raise NbdistError(ended(self.folder))

    def note_held(self, replayer: Replayer) -> None:
        """Remember the ranks that `post_mortem` can open."""
        self._raised = [] if replayer.raised is None else replayer.raised.head["held"]

    def outcome(self, replayer: Replayer, originals: Sequence[Any] | None = None) -> list[Any]:
        """Return the values of a call, or raise its exception."""
        if originals is None:
            assert replayer.head is not None
            originals = Originals(replayer.head["originals"], replayer.buffers)
        if replayer.raised is not None:
            raise error_of(replayer.raised, originals)
        return [value_of(one, self.folder.path, originals, self._held) for one in replayer.values]

    def take(self, replayer: Replayer) -> None:
        """Report to the keeper that this process has the outcome of a call, so that the session may be removed."""
        if self.connection.alive:
            self.connection.send("taken", replayer.head["call"])

    def _held(self, call: int, rank: int) -> Any:
        return self.connection.ask("value", call, rank)

    def debug(self, rank: int, commands: Iterable[str] | None, cell: Cell, stop: Stop | None = None) -> None:
        lines = None if commands is None else list(commands)
        self.outcome(self._in_turn(Action("debug", "post_mortem", asks=True, values=(rank, lines)), cell), [])

    def deliver_widget_event(self, rank: int, event: dict[str, Any], buffers: Sequence[bytes], cell: Cell) -> None:
        self._in_turn(Action("widget", "widget", asks=False, values=(rank, event, buffers)), cell)

    def empty_cache(self, cell: Cell) -> None:
        self.outcome(self._in_turn(Action("empty_cache", "empty_cache", asks=False), cell), [])

    def restart(self, cell: Cell) -> None:
        self.outcome(self._in_turn(Action("restart", "restart", asks=False), cell), [])

    def _deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
        return bool(self.connection.ask("widget", rank, content, buffers))

    def stop(self) -> None:
        """Interrupt the running action."""
        self.connection.ask("stop")

    # ------------------------------------------------------------------------------------------------------- the end

    def end(self, grace: float) -> None:
        """End the keeper, and remove the session's folder."""
        self.relays.close()
        if self.connection.alive:
            self.connection.end_keeper()
        if self.folder.exists() and not self.folder.alive():  # the keeper was killed
            self.folder.remove()


class KeeperEngine:
    """The engine of a named session in the process that uses the session. Imports are passed on to the keeper's engine.

    Args:
        send: The function that sends a message to the keeper.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._known = {"torch", "torch.distributed"}

    def warm(self, modules: Iterable[str]) -> None:
        new = set(modules) - self._known
        if new:
            self._known |= new
            self._send("warm", sorted(new))

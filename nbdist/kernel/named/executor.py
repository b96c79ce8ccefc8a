"""The executor of a named session: it has a keeper carry out the calls, and plays the journal in the cell."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import NbdistError
from ...system.interrupts import deferred_interrupts
from ...wire.journal import Reader, Record
from ...wire.parcel import Parcel
from ...wire.session_folder import SessionFolder
from ..calls import stacks
from ..calls.executor import Request
from ..calls.futures import Stop
from ..cell.cell import Cell
from ..cell.comms import Between
from ..collectives import Collectives
from ..status import Snapshot
from .connection import Connection, ended
from .outcomes import Originals, error_of, value_of
from .playing import Played, Stage, follow
from .spec import Act, Spec, own_setting


class NamedExecutor:
    """The ranks of a keeper, with the methods of an `Executor`.

    Args:
        folder: The session's.
        spec: What it is.
    """

    def __init__(self, folder: SessionFolder, spec: Spec) -> None:
        self.folder, self.closed = folder, False
        self.use(spec)
        self.connection = Connection(folder)
        self.between: Callable[[], Between | None] = lambda: None
        self.stage = Stage(self._deliver_widget_event, lambda: self.between())
        self.shown: dict[str, threading.Event] = {}
        """By the token of a call that a thread shows: the event of all of its output being shown."""
        self._raised: list[int] = []
        self._reader: Reader | None = None  # for all acts, one after the other: to find the end takes a while

    def use(self, spec: Spec) -> None:
        """Be the executor of what the keeper says that it keeps."""
        self.layout, self._sent = spec.layout, spec.setting
        self.min_ranks: int | None = spec.executor["min_ranks"]

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
        relay = self.stage.relay  # what this process has shown
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

    # ---------------------------------------------------------------------------------------------------------- acts

    def carry_out(self, request: Request, cell: Cell, stop: Stop | None = None) -> list[Any]:
        call = request.call
        names = [(obj.__module__, obj.__qualname__) for obj in call.originals if hasattr(obj, "__qualname__")]
        act = Act(
            "call",
            request.what,
            asks=stop is None,
            output=request.output,
            lines=request.lines,
            header=call.header,
            seeds=request.seeds,
            targets=request.targets,
            everyone=request.everyone,
            once=request.once,
            originals=names if len(names) == len(call.originals) else [("", "")] * len(call.originals),
        )
        played = self._act(act, cell, stop, call.parcel)
        return self.outcome(played, call.originals)  # the keeper counts it as taken: this process is there

    def _act(self, act: Act, cell: Cell, stop: Stop | None = None, parcel: Parcel | None = None) -> Played:
        """Have the keeper do something in its turn, and play what comes of it until it is over."""
        token = secrets.token_hex(8)
        if self._reader is None:
            self._reader = Reader(self.folder.path, at_end=True)
        played = Played(self.stage, self._reader, cell, lambda head: head["token"] == token)
        with deferred_interrupts():
            self._send_setting()
            self.connection.send("act", token, act, parcel=parcel)
        self.follow(played, token, stop)
        return played

    def _send_setting(self) -> None:
        setting = own_setting()
        if setting != self._sent:
            self.connection.send("setting", setting)
            self._sent = setting

    def follow(self, played: Played, token: str, stop: Stop | None) -> None:
        """Play a call, or another act, until it is over. Raises `NbdistError` where the keeper ends before."""

        def answer(question: Record) -> None:
            line: str | None = None
            try:
                if stop is None:
                    line = Cell().ask(question.head["prompt"], question.head["hidden"])
            except EOFError:
                pass
            self.connection.send("line", token, line)

        def interrupt() -> None:
            self.connection.send("stop", token)

        shown = self.shown.setdefault(token, threading.Event())
        try:
            follow(played, self.connection, stop, asks=answer, on_interrupt=interrupt)
        finally:
            played.finish()
            self.shown.pop(token, None)
            shown.set()
        self.check_over(played)
        self.note_held(played)

    def check_over(self, played: Played) -> None:
        """Raise `NbdistError` for a call whose keeper has ended before it."""
        if not played.over:
            raise NbdistError(ended(self.folder))

    def note_held(self, played: Played) -> None:
        """Keep in mind the ranks that `post_mortem` can look at."""
        self._raised = [] if played.raised is None else played.raised.head["held"]

    def outcome(self, played: Played, originals: Sequence[Any] | None = None) -> list[Any]:
        """Return what the ranks of a call have returned, or raise what it has raised."""
        assert played.head is not None
        if originals is None:
            originals = Originals(played.head["originals"], played.buffers)
        if played.raised is not None:
            raise error_of(played.raised, originals)
        return [value_of(one, self.folder.path, originals, self._held) for one in played.values]

    def take(self, played: Played) -> None:
        """Report to the keeper that the outcome of a call is here: it may be removed with the session."""
        if self.connection.alive:
            self.connection.send("taken", played.head["call"])

    def _held(self, call: int, rank: int) -> Any:
        return self.connection.ask("value", call, rank)

    def debug(self, rank: int, commands: Iterable[str] | None, cell: Cell, stop: Stop | None = None) -> None:
        lines = None if commands is None else list(commands)
        self.outcome(self._act(Act("debug", "post_mortem", asks=True, values=(rank, lines)), cell), [])

    def deliver_widget_event(self, rank: int, event: dict[str, Any], buffers: Sequence[bytes], cell: Cell) -> None:
        self._act(Act("widget", "widget", asks=False, values=(rank, event, buffers)), cell)

    def empty_cache(self, cell: Cell) -> None:
        self.outcome(self._act(Act("empty_cache", "empty_cache", asks=False), cell), [])

    def restart(self, cell: Cell) -> None:
        self.outcome(self._act(Act("restart", "restart", asks=False), cell), [])

    def _deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
        return bool(self.connection.ask("widget", rank, content, buffers))

    def stop(self) -> None:
        """Interrupt what runs."""
        self.connection.ask("stop")

    # ------------------------------------------------------------------------------------------------------- the end

    def end(self, grace: float) -> None:
        """End the keeper, and remove the session's folder."""
        self.stage.close()
        if self.connection.alive:
            self.connection.end_keeper()
        elif self.folder.exists() and not self.folder.alive():
            self.folder.remove()


class KeeperEngine:
    """The engine of a named session in a process that uses it: what it imports, the keeper's fork server imports.

    Args:
        engine: An engine of this machine, which knows its devices.
        send: Sends a message to the keeper.
    """

    local = True

    def __init__(self, engine: Any, send: Callable[..., None]) -> None:
        self._engine, self._send = engine, send
        self._known = {"torch", "torch.distributed"}

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        found: list[str] = self._engine.devices(nranks, devices)
        return found

    def warm(self, modules: Iterable[str]) -> None:
        new = set(modules) - self._known
        if new:
            self._known |= new
            self._send("warm", sorted(new))

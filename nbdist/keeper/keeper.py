"""The keeper of a named session: it does what clients ask for, and outlives them."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..engines import forkserver
from ..engines.kept import KeptEngine
from ..kernel.calls.group import GRACE_TO_LEAVE
from ..kernel.named.spec import Spec
from ..system.private import check_peer
from ..wire.channel import Channel
from ..wire.parcel import Parcel, pack
from ..wire.session_folder import SessionFolder
from .acts import Acts
from .executor import KeptExecutor
from .writing import Journal

#: Seconds from one look at what is due to the next.
_LOOK = 1.0


class Keeper:
    """The ranks of a named session, its journal and its clients.

    Args:
        folder: The session's, which is locked.
        spec: What the session is.
    """

    def __init__(self, folder: SessionFolder, spec: Spec) -> None:
        self._folder, self._spec = folder, spec
        self._bells: list[socket.socket] = []
        self._journal = Journal(folder.path, spec.keep, self._ring)
        forkserver.for_notebook(spec.notebook)
        self._engine = KeptEngine(spec.env, spec.start, spec.setting)
        self._executor = KeptExecutor(self._journal, self._engine, spec.layout, **spec.executor)
        self._acts = Acts(self._executor, self._journal)
        self._present: set[str] = set()  # the tokens of acts whose clients are there
        self._why = ""  # why it ends
        self._wakes, self._wake = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: self._end("its keeper got SIGTERM"))
        devices = list(spec.layout.devices)
        folder.describe({"nranks": len(devices), "devices": devices, "since": time.time()})
        self._engine.warm([])  # in the background

    def serve(self, listening: socket.socket) -> None:
        """Serve clients until the session is closed, or has had no call for long."""
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while not self._why:
                for key, _ in selector.select(_LOOK):
                    if key.fileobj is listening:
                        self._welcome(listening)
                self._journal.look()
                self._acts.look(self._present)
                if time.monotonic() > self._acts.used + self._spec.idle and not self._acts.lock.busy():
                    self._why = f"no call for {self._spec.idle:g} s (idle=)"
                if not self._folder.exists():  # removed by hand: no client can find it any more
                    self._why = self._why or "close"
        listening.close()
        self._leave()

    def _leave(self) -> None:
        self._executor.closed = True
        self._acts.stop_all()
        self._acts.lock.in_turn(lambda: self._executor.end(GRACE_TO_LEAVE))
        self._journal.append("over", {"why": self._why})
        self._journal.close()
        if self._why == "close" or (self._acts.taken and "idle" in self._why):
            self._folder.remove()
        else:  # an outcome that was not taken stays
            with contextlib.suppress(OSError):
                os.remove(self._folder.socket)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    def _ring(self) -> None:
        """Ring at all clients: the journal has grown. One that has not looked since the last ring needs no second."""
        for bell in list(self._bells):
            try:
                bell.send(b".")
            except BlockingIOError:
                continue
            except OSError:
                with contextlib.suppress(ValueError):
                    self._bells.remove(bell)
                bell.close()

    def _welcome(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            try:
                check_peer(connection)
            except OSError:  # another user's process, although the folder is private
                connection.close()
                return
            threading.Thread(target=self._serve_client, args=(connection,), daemon=True).start()

    def _serve_client(self, connection: socket.socket) -> None:
        """Do what a client asks, until it is gone."""
        channel, own = Channel(connection), set[str]()
        try:
            while True:
                (kind, *values), parcel, _ = channel.receive()
                if kind == "bell":
                    connection.setblocking(False)
                    self._bells.append(connection)
                    return
                if kind == "act":
                    own.add(values[0])
                    self._present.add(values[0])
                self._do(channel, kind, values, parcel)
        except (EOFError, OSError):
            connection.close()
        finally:
            self._present -= own
            for token in own:
                self._acts.leave_alone(token)

    def _do(self, channel: Channel, kind: str, values: Any, parcel: Parcel | None) -> None:
        if kind == "act":
            token, act = values
            self._acts.begin(token, act, parcel)
        elif kind == "stop":
            self._acts.stop(*values)
        elif kind == "line":
            self._acts.answer(*values)
        elif kind == "setting":
            self._engine.take(*values)
        elif kind == "warm":
            self._engine.warm(*values)
        elif kind == "taken":
            self._acts.taken = self._acts.taken or values == [self._acts.last]
        elif kind == "ask":
            self._answer(channel, *values)

    def _answer(self, channel: Channel, what: str, *values: Any) -> None:
        """Answer a question with a value, or with the exception that it has raised."""
        questions: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "spec": lambda: self._spec,
            "state": lambda: (self._executor.state(), self._acts.lock.busy()),
            "status": lambda: self._executor.look(self._acts.lock.busy()),
            "stacks": self._executor.stacks,
            "collectives": self._executor.collectives,
            "log": self._executor.log,
            "widget": self._deliver_widget_event,
            "stop": lambda: self._acts.stop(self._acts.running[0]),
            "close": lambda: self._end("close"),
        }
        answer: tuple[str, Any] = ("value", None)
        parcel = None
        try:
            if what == "value":
                held = self._acts.held[values[0], values[1]]
                parcel = pack(memoryview(held.pickled or b""), map(pickle.PickleBuffer, held.views))
            else:
                answer = "value", questions[what](*values)
        except Exception as exc:
            answer = "raised", exc
        channel.send(answer, parcel)

    def _deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Any) -> bool:
        group = self._executor.group
        return group is not None and group.ranks.deliver_widget_event(rank, content, buffers)

    def _about(self) -> dict[str, Any]:
        """Return what a list of sessions says of this one."""
        group = self._executor.group
        known = [] if group is None else [size for size in group.memory().values() if size is not None]
        line = self._executor.log(0).rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]
        state = self._executor.state(), self._acts.lock.busy()
        return {"state": state, "what": self._acts.running[1], "memory": sum(known), "line": line}

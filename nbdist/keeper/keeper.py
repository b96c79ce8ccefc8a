"""The keeper of a named session: it serves clients, and outlives them."""

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

from ..engines import forkserver, resolve
from ..engines.origin import Origin
from ..kernel.calls.group import GRACE_TO_LEAVE
from ..kernel.named.spec import Spec
from ..system.private import check_peer
from ..wire.parcel import Parcel, pack
from ..wire.session_folder import SessionFolder
from .actions import Actions
from .client import Client
from .executor import KeptExecutor
from .wakeups import Wakeups
from .writing import Journal

#: Seconds from one look at what is due to the next.
_LOOK = 1.0


class Keeper:
    """The ranks of a named session, its journal and its clients.

    Args:
        folder: The folder of the session, which is locked.
        spec: The description of the session.
    """

    def __init__(self, folder: SessionFolder, spec: Spec) -> None:
        self._folder, self._spec = folder, spec
        self._wakeups = Wakeups()
        self._journal = Journal(folder.path, spec.keep, self._wakeups.wake)
        self._engine = resolve(spec.engine, spec.env, spec.start)
        self._engine.origin = lambda: self._origin
        self._engine.borrow(spec.opened_by)
        assert spec.origin is not None
        self._work_for(spec.origin)
        self._executor = KeptExecutor(self._journal, self._engine, spec.layout, **spec.executor)
        self._actions = Actions(self._executor, self._journal, self._wakeups)
        self._requests: dict[str, Callable[..., None]] = {
            "stop": self._actions.stop,
            "line": self._actions.answer,
            "taken": self._actions.take,
            "origin": self._work_for,
            "warm": self._engine.warm,
            "close": self._close_for,
        }
        self._why = ""  # why it ends
        self._closing: list[socket.socket] = []  # the connections of clients that wait for the end
        self._wakes, self._wake = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: self._end("its keeper got SIGTERM"))
        devices = list(spec.layout.devices)
        folder.describe({"nranks": len(devices), "devices": devices, "since": time.time()})
        self._engine.warm([])  # in the background

    def serve(self, listening: socket.socket) -> None:
        """Serve clients until the session is closed, or has had no call for the time `idle`."""
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while not self._why:
                for key, _ in selector.select(_LOOK):
                    if key.fileobj is listening:
                        self._welcome(listening)
                self._journal.look()
                self._actions.look()
                if time.monotonic() > self._actions.used + self._spec.idle and not self._actions.lock.busy():
                    self._why = f"no call for {self._spec.idle:g} s (idle=)"
                if not self._folder.exists():  # removed by hand: no client can find it any more
                    self._why = self._why or "close"
        listening.close()
        self._leave()

    def _work_for(self, origin: Origin) -> None:
        """Store the state of the process that ranks work for; ranks that start from now on adopt it."""
        self._origin = origin
        forkserver.for_notebook(origin.notebook)
        os.environ.clear()
        os.environ.update(origin.environ)

    def _leave(self) -> None:
        self._executor.closed = True
        self._actions.stop_all()
        self._actions.lock.in_turn(lambda: self._executor.end(GRACE_TO_LEAVE))
        self._engine.release()
        self._journal.append("over", {"why": self._why})
        self._journal.close()
        if self._why == "close" or (self._actions.taken and "idle" in self._why):
            self._folder.remove()
        else:  # an outcome that was not taken stays
            with contextlib.suppress(OSError):
                os.remove(self._folder.socket)

    def release_clients(self) -> None:
        """Release clients that have closed the session: they need not wait for the end of this process."""
        for connection in self._closing:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _close_for(self, connection: socket.socket) -> None:
        self._closing.append(connection)
        self._end("close")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    def _welcome(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            try:
                check_peer(connection)
            except OSError:  # another user's process, although the folder is private
                connection.close()
                return
            client = Client(connection, self._actions, self._requests, self._answer, self._wakeups.add)
            threading.Thread(target=client.serve, daemon=True).start()

    def _answer(self, what: str, *values: Any) -> tuple[tuple[str, Any], Parcel | None]:
        """Answer a question with a value, or with the exception that was raised. Some values are parcels."""
        questions: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "spec": lambda: self._spec,
            "state": lambda: (self._executor.state(), self._actions.busy()),
            "status": lambda: self._executor.look(self._actions.busy()),
            "stacks": self._executor.stacks,
            "collectives": self._executor.collectives,
            "log": self._executor.log,
            "widget": self._deliver_widget_event,
            "flush": self._journal.flush,
            "stop": lambda: self._actions.stop(self._actions.running[0]),
        }
        try:
            if what == "value":
                held = self._actions.held.get(*values)
                return ("value", None), pack(memoryview(held.pickled or b""), map(pickle.PickleBuffer, held.views))
            return ("value", questions[what](*values)), None
        except Exception as exc:
            return ("raised", exc), None

    def _deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Any) -> bool:
        group = self._executor.group
        return group is not None and group.ranks.deliver_widget_event(rank, content, buffers)

    def _about(self) -> dict[str, Any]:
        """Return the description of this session for the list of sessions."""
        group = self._executor.group
        known = [] if group is None else [size for size in group.memory().values() if size is not None]
        line = self._executor.log(0).rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]
        state = self._executor.state(), self._actions.busy()
        return {"state": state, "what": self._actions.running[1], "memory": sum(known), "line": line}

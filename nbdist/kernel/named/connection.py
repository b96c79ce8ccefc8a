"""The connection to a keeper: messages to it, its answers, and wakeups when the journal has grown."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from ...errors import NbdistError
from ...system.interrupts import deferred_interrupts
from ...system.private import connect
from ...system.processes import redirect_to_devnull, register_after_fork
from ...wire.channel import Channel
from ...wire.parcel import Parcel
from ...wire.session_folder import SessionFolder
from .spec import Answer, decode_answers


class Wakeup:
    """An object that becomes readable when the journal has grown, an answer has come, or the keeper has ended."""

    def __init__(self, path: str) -> None:
        self.name = secrets.token_hex(8)
        self._sock, self._data = connect(path), b""
        Channel(self._sock).send(("wakeup", self.name))
        self._sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def read(self) -> list[Answer] | None:
        """Return the answers that have come, and wait for what comes from now on. None: the keeper has ended."""
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        answers, self._data = decode_answers(self._data + data)
        return answers if data else None

    def close(self) -> None:
        self._sock.close()


class Connection:
    """The connection to the keeper of a session. It is closed from the start if the keeper has ended.

    Args:
        folder: The folder of the session.

    Raises:
        PermissionError: Other users can access the folder, or a process of another user listens there.
    """

    def __init__(self, folder: SessionFolder) -> None:
        self._folder, self._lock = folder, threading.RLock()
        self._channel: Channel | None = None
        self._wakeups: list[Wakeup] = []
        folder.check()
        with contextlib.suppress(FileNotFoundError, ConnectionError):
            self._channel = Channel(connect(folder.socket))
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the connection in a child of this process: it belongs to the parent."""
        self._lock = threading.RLock()
        redirect_to_devnull(*(end.fileno() for end in (self._channel, *self._wakeups) if end is not None))

    @property
    def alive(self) -> bool:
        """True if the keeper lived at the time of the last request."""
        return self._channel is not None

    def send(self, *message: Any, parcel: Parcel | None = None) -> None:
        """Send a message that is not answered. Raises `NbdistError` if the keeper has ended."""
        with self._used() as channel:
            channel.send(message, parcel)

    def ask(self, what: str, *values: Any) -> Any:
        """Return the keeper's answer to a question, or the parcel that comes with it.

        Raises `NbdistError` if the keeper has ended, and the exceptions that the keeper has raised.
        """
        with self._used() as channel, deferred_interrupts():
            channel.send(("ask", what, *values))
            (kind, answer), parcel, _ = channel.receive()
        if kind == "raised":
            raise answer
        return answer if parcel is None else parcel

    @contextlib.contextmanager
    def _used(self) -> Iterator[Channel]:
        with self._lock:
            if self._channel is None:
                raise NbdistError(ended(self._folder))
            try:
                yield self._channel
            except (EOFError, ConnectionError):
                self.close()
                raise NbdistError(ended(self._folder)) from None

    @contextlib.contextmanager
    def wakeup(self) -> Iterator[Wakeup | None]:
        """Return a wakeup for one reader; None if the keeper has ended."""
        wakeup = None
        with self._lock:
            if self._wakeups:
                wakeup = self._wakeups.pop()
            elif self._channel is not None:
                with contextlib.suppress(FileNotFoundError, ConnectionError):
                    wakeup = Wakeup(self._folder.socket)
        try:
            yield wakeup
        finally:
            if wakeup is not None:
                self._wakeups.append(wakeup)

    def end_keeper(self) -> None:
        """End the keeper, and wait until its ranks have ended and the session's files are closed or removed."""
        with contextlib.suppress(NbdistError), self._used() as channel:
            channel.send(("close",))
            channel.receive()  # nothing comes but the end

    def close(self) -> None:
        """Close the connection, and leave the keeper running."""
        with self._lock:
            channel, self._channel = self._channel, None  # first: an interrupt may come between two steps
            if channel is not None:
                channel.close()
            while self._wakeups:
                self._wakeups.pop().close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an interrupt came before `__init__`
            self.close()


def ended(folder: SessionFolder) -> str:
    """Return the error for a session whose keeper has ended."""
    if not folder.exists():
        return f"the session {folder.name!r} is closed; make a new one"
    why = "its machine was restarted" if folder.restarted() else "its keeper has ended"
    rest = f"replay() and result() give what its journal has, close() removes that from {folder.path}"
    return f"the session {folder.name!r} has no ranks any more: {why}. {rest}"

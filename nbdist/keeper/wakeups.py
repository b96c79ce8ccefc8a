"""The connections by which a keeper wakes its clients when the journal has grown."""

from __future__ import annotations

import socket
import threading

from ..kernel.named.spec import WAKEUP, Answer, encode_answer


class Wakeups:
    """The connections of clients that wait, by name. A client can get the values of its call on its connection, too."""

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}
        self._rests: dict[str, bytes] = {}  # the part of an answer for which a connection had no room
        self._lock = threading.Lock()  # nothing may come between two parts of an answer

    def add(self, name: str, connection: socket.socket) -> None:
        """Write to this connection whenever the journal has grown."""
        connection.setblocking(False)
        with self._lock:
            self._connections[name] = connection

    def wake(self, but: str = "") -> None:
        """Wake all clients except the one with the name `but`, because the journal has grown. A client that has not yet
        read the byte of an earlier wakeup may get no second one.
        """
        with self._lock:
            for name in [name for name in self._connections if name != but]:
                rest = self._rests.pop(name, b"")
                done = self._send(name, rest or WAKEUP)
                if rest[done:]:
                    self._rests[name] = rest[done:]

    def answer(self, name: str, answer: Answer) -> bool:
        """Send the values of a call to the client with this name. Return False if the client has to read the
        journal."""
        with self._lock:
            if name not in self._connections or name in self._rests:
                return False
            data = encode_answer(answer)
            done = self._send(name, data)
            if 0 < done < len(data):
                self._rests[name] = data[done:]
            return done == len(data)

    def _send(self, name: str, data: bytes) -> int:
        """Send to a client as much as its connection has room for; return the number of bytes."""
        try:
            return self._connections[name].send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._connections.pop(name).close()
            return 0

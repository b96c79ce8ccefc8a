"""Messages over a Unix socket, with a parcel or descriptors."""

from __future__ import annotations

import math
import os
import pickle
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any

from ..system.interrupts import deferred_interrupts
from ..system.segments import BufferLocation, Segment
from .parcel import MOST_SEGMENTS, Parcel
from .protocol import KINDS

_MESSAGE = struct.Struct("<QI")
_MOST_FDS = MOST_SEGMENTS + 8


class LostDescriptors(OSError):
    """A message has arrived without its descriptors, because this process cannot open more. The channel can still be
    used.
    """

    def __init__(self, message: tuple[Any, ...]) -> None:
        super().__init__("descriptors were lost on the way: is the limit of open files (ulimit -n) reached?")
        self.message = message


def readable(fd: Any, seconds: float = 0.0) -> bool:
    """Return whether `fd` becomes readable, or is closed, within a number of seconds."""
    poll = select.poll()  # select.select knows only the first 1024 descriptors
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds == math.inf else seconds * 1000))


class Channel:
    """A connection for messages over a Unix socket: messages of the `protocol`, or plain tuples, with a parcel or
    descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # `socket.setdefaulttimeout` of the notebook gives a timeout to new sockets
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: tuple[Any, ...], parcel: Parcel | None = None, fds: Iterable[int] = ()) -> None:
        """Send a whole `message`. Raises `OSError` when the other end is closed."""
        fds = list(fds)
        about = None
        if parcel is not None:
            about = (parcel.inline, [tuple(span) for span in parcel.spans], [s.size for s in parcel.segments])
            fds += [segment.fd for segment in parcel.segments]
        # By name: pickle would look up how to make each message again, which takes it eight times as long.
        body = pickle.dumps((type(message).__name__, tuple(message), about), protocol=5)
        head = _MESSAGE.pack(len(body), len(fds))
        with deferred_interrupts():
            sent = socket.send_fds(self.sock, [head, body], fds)
            if sent < len(head) + len(body):
                self.sock.sendall((head + body)[sent:])

    def limit_sending(self, seconds: float) -> None:
        """Make `send` raise `BlockingIOError` if the other end reads nothing for this number of seconds."""
        whole, part = divmod(max(1, int(seconds * 1e6)), 1_000_000)  # zero would be no limit
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, part))

    def receive(self) -> tuple[Any, Parcel | None, list[int]]:
        """Return the next message, its parcel, and its descriptors. A message that is half read when an interrupt comes
        is lost.

        Raises `EOFError` when the other end is closed, and `LostDescriptors`.
        """
        # The descriptors come with the first byte, so they are asked for with the head and never with the body.
        head, fds, _, _ = socket.recv_fds(self.sock, _MESSAGE.size, _MOST_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            while len(head) < _MESSAGE.size:
                head += self._some(_MESSAGE.size - len(head))
            size, count = _MESSAGE.unpack(head)
            body = bytearray()
            while len(body) < size:
                body += self._some(min(size - len(body), 1 << 20))
            name, values, about = pickle.loads(body)
            message = KINDS[name](*values) if name in KINDS else values
            if len(fds) != count:
                raise LostDescriptors(message)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        parcel = None
        if about is not None:
            inline, spans, sizes = about
            fds, own = fds[: len(fds) - len(sizes)], fds[len(fds) - len(sizes) :]
            segments = [Segment(fd, size) for fd, size in zip(own, sizes, strict=True)]
            parcel = Parcel(inline, [BufferLocation(*span) for span in spans], segments)
        return message, parcel, fds

    def _some(self, size: int) -> bytes:
        data = self.sock.recv(size)
        if not data:
            raise EOFError("the other end of the channel is closed")
        return data

    def close(self) -> None:
        self.sock.close()

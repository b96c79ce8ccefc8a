"""A rank's end of its channel to the kernel."""

from __future__ import annotations

import socket

from ..system.interrupts import deferred_interrupts
from ..wire import protocol
from ..wire.channel import Channel, readable
from ..wire.parcel import Parcel
from .world import Membership


class KernelChannel(Channel):
    """A channel that leaves the process group when the kernel sends `Leave`, whatever message the rank waits for."""

    def __init__(self, sock: socket.socket, membership: Membership) -> None:
        super().__init__(sock)
        self._membership = membership

    def receive(self, interruptible: bool = False) -> tuple[protocol.ToRank, Parcel | None, list[int]]:
        """Receive the kernel's next message other than `Leave`.

        Args:
            interruptible: Whether an interrupt raises `KeyboardInterrupt` here. It does so between messages, and never
                in the middle of one.

        Raises `EOFError` when the kernel has ended.
        """
        while True:
            message, parcel, fds = self._receive_between_interrupts() if interruptible else super().receive()
            if not isinstance(message, protocol.Leave):
                return message, parcel, fds
            self._membership.leave(message.peers)

    def _receive_between_interrupts(self) -> tuple[protocol.ToRank, Parcel | None, list[int]]:
        while not readable(self, 3600.0):
            pass
        with deferred_interrupts():
            return super().receive()

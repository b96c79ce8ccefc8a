"""The service for one client of a keeper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..kernel.named.spec import Action
from ..wire.channel import Channel
from ..wire.parcel import Parcel
from .actions import Actions


class Client:
    """The connection of a client. One thread at a time reads, and runs the action that it has read: passing the action
    to another thread would take longer than a short call. Before the action waits for long, another thread reads on.

    Args:
        connection: The connection, whose other end is a process of the same user.
        actions: The actions of the keeper.
        requests: The function for each kind of message.
        answer: A function that returns the answer to a question, and its parcel.
        wake_later: A function that registers the connection of a client for wakeups.
    """

    def __init__(
        self,
        connection: socket.socket,
        actions: Actions,
        requests: Mapping[str, Callable[..., None]],
        answer: Callable[..., tuple[Any, Parcel | None]],
        wake_later: Callable[[str, socket.socket], None],
    ) -> None:
        self._channel, self._actions, self._requests = Channel(connection), actions, requests
        self._answer, self._wake_later = answer, wake_later
        self._tokens: set[str] = set()  # of its actions
        self._reading = threading.Lock()
        self._spare = False  # whether a thread waits to read

    def serve(self) -> None:
        """Handle messages of the client, until it is gone or another thread reads on."""
        while not self._spare:
            self._spare = True
            self._reading.acquire()
            self._spare, reads = False, True

            def hand_over() -> None:
                nonlocal reads
                if reads:
                    if not self._spare:
                        threading.Thread(target=self.serve, daemon=True).start()
                    reads = False
                    self._reading.release()

            try:
                while reads and (work := self._next(hand_over)) is not None:
                    work()
                if reads:  # the client is gone
                    return
            finally:
                if reads:
                    self._reading.release()

    def _next(self, hand_over: Callable[[], None]) -> Callable[[], None] | None:
        """Handle messages of the client, up to an action. Return a function that runs the action, or None if the client
        is gone.

        `hand_over` lets another thread read the following messages.
        """
        try:
            while True:
                (kind, *values), parcel, _ = self._channel.receive()
                if kind == "action":
                    self._tokens.add(values[0])
                    self._actions.present.add(values[0])
                    token, wakeup, *action = values
                    return self._actions.queue(token, Action(*action), parcel, hand_over, wakeup)
                if kind == "wakeup":
                    self._wake_later(values[0], self._channel.sock)
                    return None
                if kind == "close":
                    self._requests[kind](self._channel.sock)
                elif kind == "ask":
                    answer, parcel = self._answer(*values)
                    self._channel.send(answer, parcel)
                else:
                    self._requests[kind](*values)
        except (EOFError, OSError):
            self._channel.sock.close()
            self._actions.present -= self._tokens
            for token in self._tokens:
                self._actions.leave_alone(token)
            self._tokens.clear()
            return None

"""The threads that serve a client: which one reads while an action runs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import poll

from nbdist.keeper.client import Client
from nbdist.kernel.named.spec import Action
from nbdist.wire.channel import Channel


class Actions:
    """A stand-in for the keeper's actions. A "long" one ends when the client has sent a line."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.threads: list[int] = []
        self.line = threading.Event()

    def queue(
        self, token: str, action: Action, parcel: Any, hand_over: Callable[[], None], wakeup: str
    ) -> Callable[[], None]:
        def run() -> None:
            if action.what == "long":
                hand_over()
                hand_over()  # the second time does nothing
                assert self.line.wait(60)
                self.line.clear()
            self.threads.append(threading.get_ident())

        return run

    def leave_alone(self, token: str) -> None: ...


@pytest.fixture
def served() -> Iterator[tuple[Channel, Actions, list[threading.Thread]]]:
    mine, other = socket.socketpair()
    before = set(threading.enumerate())
    actions: Any = Actions()
    client = Client(other, actions, {"line": actions.line.set}, lambda *_: (None, None), lambda _: None)
    threading.Thread(target=client.serve, daemon=True).start()
    yield Channel(mine), actions, [one for one in threading.enumerate() if one not in before]
    mine.close()
    assert poll(lambda: set(threading.enumerate()) <= before), "no thread is left when the client is gone"


def send(channel: Channel, what: str, count: int = 1) -> None:
    for number in range(count):
        channel.send(("action", f"{what} {number}", "", *Action("call", what, asks=False)))


def test_one_thread_carries_out_short_calls(served: tuple[Channel, Actions, list[threading.Thread]]) -> None:
    channel, actions, threads = served
    send(channel, "short", 20)
    assert poll(lambda: len(actions.threads) == 20)
    assert set(actions.threads) == {one.ident for one in threads}


def test_the_client_is_heard_during_a_long_call(served: tuple[Channel, Actions, list[threading.Thread]]) -> None:
    channel, actions, _ = served
    for count in (2, 4, 6):
        send(channel, "long")
        channel.send(("line",))
        send(channel, "short")
        assert poll(lambda count=count: len(actions.threads) == count)  # type: ignore[misc]

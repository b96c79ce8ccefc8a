"""The inbox for messages of a cluster: packed on the node, received by a thread of the kernel, passed on in order."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.engines.contract import Exit
from nbdist.engines.ray.kernel.inbox import Inbox, InboxListener
from nbdist.engines.ray.node.agent import packed
from nbdist.system.segments import Segment
from nbdist.wire.parcel import Parcel
from nbdist.wire.protocol import Begun, Done, Raised


class FakeDriver:
    """Keeps the messages that the kernel sends, and delivers events of nodes."""

    world_size = 4

    def __init__(self) -> None:
        self.receiver: Any = None
        self.sent: list[Any] = []

    def subscribe(self, receiver: Any) -> None:
        self.receiver = receiver

    def send(self, *message: Any) -> None:
        self.sent.append(message)

    def deliver(self, *events: Any) -> None:
        self.receiver("events", pickle.dumps(list(events)), None)


class Received:
    """Calls that a listener has passed on."""

    def __init__(self, inbox: Inbox) -> None:
        self.all: list[Any] = []
        self.interrupt = False
        self.listener = InboxListener(
            inbox,
            on_output=self._output,
            on_message=lambda rank, message, parcel: self.all.append((rank, message, parcel and parcel.inline)),
            on_exit=self.all.append,
            pause=0.3,
        )

    def _output(self, rank: int, which: int, data: bytes) -> None:
        if self.interrupt:
            self.interrupt = False
            signal.raise_signal(signal.SIGINT)
        self.all.append((rank, which, data))


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def inbox(driver: Any) -> Iterator[Inbox]:
    inbox = Inbox(driver)
    yield inbox
    inbox.close()


@pytest.fixture
def received(inbox: Inbox) -> Iterator[Received]:
    received = Received(inbox)
    yield received
    received.listener.close()


def test_messages_and_output_are_passed_on_in_order(driver: FakeDriver, inbox: Inbox, received: Received) -> None:
    done = Done(True)
    driver.deliver(("started", 0, 123), ("output", 1, 0, b"a"), ("message", [1, 2], done, None))
    driver.deliver(("output", 3, 1, b"b"), ("exit", 3, -9, ""), ("message", [0], done, b"value"))
    received.listener.select(10.0)
    assert received.all == [
        *[(1, 0, b"a"), (1, done, None), (2, done, None), (3, 1, b"b"), Exit(3, -9), (0, done, b"value")]
    ]
    assert inbox.pids == [123, None, None, None] and inbox.alive == {0, 1, 2}
    received.listener.select(0.0)  # does not wait


def test_the_output_of_two_ranks_stays_in_order(driver: FakeDriver, received: Received) -> None:
    """A notice of what a node leaves out is in the stream of one rank, and ends the lines of the others."""
    begun = Begun()
    driver.deliver(("message", [1], begun, None), ("output", 0, 0, b"a"), ("output", 1, 0, b"b"))
    driver.deliver(("output", 0, 0, b"c"), ("message", [1], Done(True), None))
    received.listener.select(10.0)
    assert received.all == [(1, begun, None), (0, 0, b"a"), (1, 0, b"b"), (0, 0, b"c"), (1, Done(True), None)]


def test_a_lost_node_takes_its_living_ranks_with_it(driver: FakeDriver, inbox: Inbox, received: Received) -> None:
    driver.deliver(("exit", 2, 0, ""))
    driver.receiver("lost", ((2, 4), "was lost"), None)
    assert inbox.any_exit() and inbox.exits() == [Exit(2, 0), Exit(3, None, "was lost")] and not inbox.exits()
    driver.receiver("lost", (None, "all"), None)
    received.listener.select(10.0)
    assert received.all == [Exit(0, None, "all"), Exit(1, None, "all")]


def test_an_interrupt_loses_nothing_that_comes_after_it(driver: FakeDriver, received: Received) -> None:
    received.interrupt = True
    driver.deliver(("output", 0, 0, b"a"), ("message", [0], Done(True), None))
    with pytest.raises(KeyboardInterrupt):
        received.listener.select(10.0)
    received.listener.select(None)
    assert received.all == [(0, 0, b"a"), (0, Done(True), None)]


def test_the_driver_gets_acknowledgments_of_output(driver: FakeDriver, inbox: Inbox) -> None:
    for _ in range(5):
        driver.deliver(("output", 0, 0, bytes(100_000)))
    assert not driver.sent, "a driver whose output is not read makes its ranks wait"
    sizes: list[int] = []
    inbox.drain(0, lambda rank, which, data: sizes.append(len(data)))
    assert sizes == [100_000] * 5 and driver.sent == [("read", 0, 300_000)]


def test_big_answers_are_closed_with_the_inbox(driver: Any) -> None:
    inbox = Inbox(driver)
    receiver, waiting, late = driver.receiver, Segment.create(100), Segment.create(100)
    receiver("answered", (0, Done(True)), Parcel(None, [], [waiting]))
    inbox.close()
    receiver("answered", (0, Done(True)), Parcel(None, [], [late]))
    assert waiting.fd == late.fd == -1


def test_equal_messages_of_ranks_of_a_node_are_sent_once() -> None:
    done = Done(True)
    events: list[Any] = [("message", [rank], Begun(), None) for rank in range(3)]
    events += [("message", [rank], done, None) for rank in range(2)]
    [(kind, batch)] = packed(events)
    assert kind == "events" and pickle.loads(batch) == [
        ("message", [2], Begun(), None),
        ("message", [0, 1], done, None),
    ]
    [(_, batch)] = packed([("message", [0], Raised(), None), ("message", [1], Begun(), None)])
    assert [type(message) for _, _, message, _ in pickle.loads(batch)] == [Raised, Begun], "both are empty tuples"
    big: list[Any] = [("output", 0, 0, b"before"), ("part", "1", 5, 0, b"12345"), ("answered", 0, done, "about")]
    first, *rest = packed([*big, ("exit", 0, 0, "")])
    assert pickle.loads(first[1]) == big[:1] and rest[:2] == big[1:]
    assert pickle.loads(rest[2][1]) == [("exit", 0, 0, "")]

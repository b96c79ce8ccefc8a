"""Messages from a cluster: packed on the node, taken in by a thread of the kernel, passed on in order."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.engines.contract import Exit
from nbdist.engines.ray.kernel.inbox import News, NewsListener
from nbdist.engines.ray.node.agent import packed
from nbdist.system.segments import Segment
from nbdist.wire.parcel import Parcel
from nbdist.wire.protocol import Begun, Done, Raised


class FakeDriver:
    """Takes what the kernel says, and lets a test say what nodes say."""

    world_size = 4

    def __init__(self) -> None:
        self.hearer: Any = None
        self.sent: list[Any] = []

    def hear(self, hearer: Any) -> None:
        self.hearer = hearer

    def send(self, *message: Any) -> None:
        self.sent.append(message)

    def told(self, *events: Any) -> None:
        self.hearer("told", pickle.dumps(list(events)), None)


class Heard:
    """Calls that a listener has passed on."""

    def __init__(self, news: News) -> None:
        self.all: list[Any] = []
        self.interrupt = False
        self.listener = NewsListener(
            news,
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
def news(driver: Any) -> Iterator[News]:
    news = News(driver)
    yield news
    news.close()


@pytest.fixture
def heard(news: News) -> Iterator[Heard]:
    heard = Heard(news)
    yield heard
    heard.listener.close()


def test_what_ranks_say_is_passed_on_in_order(driver: FakeDriver, news: News, heard: Heard) -> None:
    done = Done(True)
    driver.told(("started", 0, 123), ("output", 1, 0, b"a"), ("message", [1, 2], done, None))
    driver.told(("output", 3, 1, b"b"), ("exit", 3, -9, ""), ("message", [0], done, b"value"))
    heard.listener.select(10.0)
    assert heard.all == [
        *[(1, 0, b"a"), (1, done, None), (2, done, None), (3, 1, b"b"), Exit(3, -9), (0, done, b"value")]
    ]
    assert news.pids == [123, None, None, None] and news.alive == {0, 1, 2}
    heard.listener.select(0.0)  # does not wait


def test_a_lost_node_takes_its_living_ranks_with_it(driver: FakeDriver, news: News, heard: Heard) -> None:
    driver.told(("exit", 2, 0, ""))
    driver.hearer("lost", ((2, 4), "was lost"), None)
    assert news.any_exit() and news.exits() == [Exit(2, 0), Exit(3, None, "was lost")] and not news.exits()
    driver.hearer("lost", (None, "all"), None)
    heard.listener.select(10.0)
    assert heard.all == [Exit(0, None, "all"), Exit(1, None, "all")]


def test_an_interrupt_loses_nothing_that_comes_after_it(driver: FakeDriver, heard: Heard) -> None:
    heard.interrupt = True
    driver.told(("output", 0, 0, b"a"), ("message", [0], Done(True), None))
    with pytest.raises(KeyboardInterrupt):
        heard.listener.select(10.0)
    heard.listener.select(None)
    assert heard.all == [(0, 0, b"a"), (0, Done(True), None)]


def test_the_driver_is_told_what_was_read(driver: FakeDriver, news: News) -> None:
    for _ in range(5):
        driver.told(("output", 0, 0, bytes(100_000)))
    assert not driver.sent, "ranks wait after some megabytes that nobody reads"
    sizes: list[int] = []
    news.drain(0, lambda rank, which, data: sizes.append(len(data)))
    assert sizes == [100_000] * 5 and driver.sent == [("read", 0, 300_000)]


def test_big_answers_that_nobody_takes_are_given_up(driver: Any) -> None:
    news = News(driver)
    hearer, waiting, late = driver.hearer, Segment.create(100), Segment.create(100)
    hearer("answered", (0, Done(True)), Parcel(None, [], [waiting]))
    news.close()
    hearer("answered", (0, Done(True)), Parcel(None, [], [late]))
    assert waiting.fd == late.fd == -1


def test_a_node_says_once_what_its_ranks_say_alike() -> None:
    done = Done(True)
    events: list[Any] = [("message", [rank], Begun(), None) for rank in range(3)]
    events += [("message", [rank], done, None) for rank in range(2)]
    [(kind, told)] = packed(events)
    assert kind == "told" and pickle.loads(told) == [
        ("message", [2], Begun(), None),
        ("message", [0, 1], done, None),
    ]
    [(_, told)] = packed([("message", [0], Raised(), None), ("message", [1], Begun(), None)])
    assert [type(message) for _, _, message, _ in pickle.loads(told)] == [Raised, Begun], "both are empty tuples"
    big: list[Any] = [("output", 0, 0, b"before"), ("part", "1", 5, 0, b"12345"), ("answered", 0, done, "about")]
    first, *rest = packed([*big, ("exit", 0, 0, "")])
    assert pickle.loads(first[1]) == big[:1] and rest[:2] == big[1:]
    assert pickle.loads(rest[2][1]) == [("exit", 0, 0, "")]

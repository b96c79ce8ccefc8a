"""Data go to two nodes, which pass them on: everybody gets them once, also where one of them is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nbdist.engines.ray.driver import forwarding
from nbdist.engines.ray.driver.forwarding import CHUNK, Forwarding
from nbdist.engines.ray.node.storing import Branch
from nbdist.system.segments import Segment


class FakeSegment:
    """Three parts, the last one small."""

    size = 2 * CHUNK + 5

    def __init__(self) -> None:
        self.taken: list[int] = []

    def chunk(self, start: int) -> int:
        self.taken.append(start)
        return start

    def sent(self) -> None: ...


class FakeLink:
    """A node that passes on what it gets, as `storing.Stored` does."""

    def __init__(self, number: int, lost_at: int | None = None) -> None:
        self.number, self.first, self.count, self.lost = number, number, 1, ""
        self.name, self.host = f"node {number}", self
        self.parts: list[int] = []
        self._lost_at = lost_at  # the part at which it is lost

    async def call(self, method: str, key: str, size: int, start: int, data: int, below: list[Branch]) -> set[int]:
        assert (method, key, size) == ("store", "a", FakeSegment.size)
        if self._lost_at is not None and start >= self._lost_at:
            raise ConnectionError("gone")
        self.parts.append(data)
        missed: set[int] = set()
        for one in below:
            try:
                missed |= await one.host.call(method, key, size, start, data, one.below)
            except ConnectionError:
                missed |= set(one.numbers)
        return missed


class FakeKernel:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def send(self, message: Any, parcel: None = None) -> None:
        self.told.append(message)


PARTS = [0, CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_each_node_gets_each_part_once_and_the_driver_sends_it_twice(count: int) -> None:
    links: list[Any] = [FakeLink(number) for number in range(count)]
    segment: Any = FakeSegment()
    kernel: Any = FakeKernel()
    asyncio.run(Forwarding(links, kernel)._spread("a", segment, links))
    assert [link.parts for link in links] == [PARTS] * count
    assert sorted(segment.taken) == sorted(PARTS * min(count, 2)) and not kernel.told


@pytest.mark.parametrize("lost", [{0}, {4}, {1, 2, 5}, {0, 4, 1, 7}])
@pytest.mark.parametrize("lost_at", [0, 2 * CHUNK])
def test_parts_reach_their_nodes_around_a_lost_node(lost: set[int], lost_at: int) -> None:
    links: list[Any] = [FakeLink(number, lost_at if number in lost else None) for number in range(8)]
    segment: Any = FakeSegment()
    kernel: Any = FakeKernel()
    asyncio.run(Forwarding(links, kernel)._spread("a", segment, links))
    assert all(set(link.parts) == set(PARTS) for link in links if link.number not in lost)
    told = {message[2][0][0] for message in kernel.told}
    assert told == lost, "they are lost, nobody else"


def test_a_thousand_nodes_are_ten_steps_away() -> None:
    def depth(branches: list[Branch]) -> int:
        return 1 + max((depth(one.below) for one in branches), default=-1)

    links: list[Any] = [FakeLink(number) for number in range(1250)]
    found = forwarding.plan(links)
    assert len(found) == 2 and depth(found) <= 10
    assert sorted(number for one in found for number in one.numbers) == list(range(1250))


def test_the_last_part_of_a_segment_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "CHUNK", 4)
    monkeypatch.setattr("ray.put", bytes)  # in the place of the object store
    segment = Segment.create(10)
    segment.write(memoryview(bytes(range(10))), 0)
    shared = forwarding.SharedSegment(segment)
    assert [shared.chunk(start) for start in (0, 4, 8)] == [bytes(range(4)), bytes(range(4, 8)), bytes([8, 9])]
    shared.close()

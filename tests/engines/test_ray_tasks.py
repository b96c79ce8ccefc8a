"""The workers of `parallel_map` on a cluster: what Ray's driver makes of the ends of tasks."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nbdist import RayOptions
from nbdist.wire.protocol import Begin, Items

pytest.importorskip("ray")
import ray

from nbdist.engines.ray.driver.tasks import Tasks


class Late:
    """A task that Ray cancels only when `over` is set."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self.over.wait()
        raise ray.exceptions.TaskCancelledError
        yield


class Remote:
    """A function on the cluster, whose tasks are `started`."""

    def __init__(self) -> None:
        self.started: list[Late] = []

    def remote(self, *arguments: Any) -> Late:
        self.started.append(Late())
        return self.started[-1]


async def begun(tasks: Tasks, remote: Remote) -> Late:
    """Open a call, and start the task of its one item."""
    before = len(remote.started)
    await tasks.call("open", None, 0, 1, [], False, {})
    messages = [(0, Begin(0, None, 1, [], 1, b"")), (0, Items(0))]
    await tasks.call("deliver", 0, [(pickle.dumps([message]), None) for message in messages], [])
    while len(remote.started) == before:
        await asyncio.sleep(0)
    return remote.started[-1]


def test_a_task_that_ends_after_its_call_says_nothing_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", lambda task, force: cancelled.append((task, force)))

    async def two_calls() -> None:
        tasks, remote = Tasks(RayOptions(), 1, {}), Remote()
        tasks._task = remote
        first = await begun(tasks, remote)
        await tasks.call("ask", "close", 0.0)
        assert cancelled == [(first, False), (first, True)]
        assert (await tasks.call("poll", 0))[2] == [("closed",)]
        second = await begun(tasks, remote)
        first.over.set()
        for _ in range(10):
            await asyncio.sleep(0)
        polled = asyncio.ensure_future(tasks.call("poll", 0))
        await asyncio.sleep(0)
        assert not polled.done(), polled.result()
        await tasks.call("ask", "signals", [(0, 2)])
        assert cancelled[-1] == (second, False), "and the next call's task can be stopped"
        second.over.set()
        assert (await polled)[2], "its own end is told"

    asyncio.run(two_calls())

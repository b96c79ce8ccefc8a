"""A chunk of items of `parallel_map`, in a Ray process: a process from the fork server works on it.

This process is kept for the next chunk of the call that Ray runs here. For the function and its user, it is like any
worker; and if it dies, the Ray process can report how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ....wire import protocol
from .agent import Agent, Event, describe, unpacked

#: Seconds within which an interrupt is noticed here: an interrupt of Ray does not end a wait.
_HEARTBEAT = 0.1
#: Seconds that a function gets to clean up after an interrupt.
_GRACE = 5.0

_kept: tuple[str, Worker] | None = None


class Worker:
    """The process that works for one call, with its agent.

    Args:
        surroundings: The notebook's `sys.path` and folder, and the GPUs of the call.
        modules, notebook, env: As for `Agent`.
        begin: The message with the function.
        first: The number of the first item that the process will get.
    """

    def __init__(
        self, surroundings: Sequence[Any], modules: Any, notebook: bool, env: Any, begin: Any, first: int
    ) -> None:
        import ray

        path, cwd, _, _ = surroundings
        node = describe(ray.util.get_node_ip_address(), path, cwd, (), 1)
        message, parcel = begin
        environ = {**node.environ, **message.setting.environ}
        setting = dataclasses.replace(message.setting, environ=environ, cwd=node.cwd, path=node.path)
        # Ray may bring the chunks of one worker to several processes, which must not all draw the same numbers.
        own = [seed + message.workers * first for seed in message.seeds]
        self._agent = Agent(0, 1, modules, notebook, env, _HEARTBEAT, grouped=False)
        self._polls = self._deliveries = 0
        self.deliver(message._replace(setting=setting, seeds=own), parcel)

    def deliver(self, message: protocol.ToRank, parcel: Any) -> None:
        """Send the process a message."""
        import ray

        if parcel is not None:
            inline, spans, segments = parcel
            for key, size, parts in segments:
                for start, part in parts.items():
                    self._agent.stored.store(key, size, start, ray.get(part), ())
            parcel = inline, spans, [key for key, _, _ in segments]
        self._deliveries += 1
        self._agent.deliver(self._deliveries, [(pickle.dumps([(0, message)], protocol=5), parcel)], ())

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        self._polls, _, items = self._agent.poll(self._polls)
        return unpacked(items)

    def interrupt(self) -> None:
        """Interrupt the function, because its call is over."""
        self._agent.ask("signals", [(0, signal.SIGINT)])

    def close(self) -> None:
        """End the process."""
        self._agent.ask("close", 0.0)


def work(
    call: str, surroundings: Sequence[Any], modules: Any, notebook: bool, env: Any, begin: Any, items: Any
) -> Iterator[list[Event]]:
    """Yield the events of the work on these items.

    Args:
        call: The name of the call.
        surroundings, modules, notebook, env: As for `Worker`.
        begin, items: The messages with the function and with the items.
    """
    global _kept
    if _kept is not None and _kept[0] != call:
        _forget()
    if _kept is None:
        _kept = call, Worker(surroundings, modules, notebook, env, begin, first=items[0].first)
    worker, over = _kept[1], False
    try:
        worker.deliver(*items)
        while not over:
            events = worker.events()
            over = any(map(is_last, events))
            if any(event[0] == "exit" for event in events):
                _forget()
            if events:
                yield events
    except KeyboardInterrupt:  # Ray's: it was asked to cancel the task
        worker.interrupt()
        deadline = time.monotonic() + _GRACE
        while not over and time.monotonic() < deadline:
            events = worker.events()
            over = any(map(is_last, events))
            if events:
                yield events
        raise
    finally:
        if not over:
            _forget()


def is_last(event: Event) -> bool:
    """Return whether an event is the last one of a chunk."""
    return event[0] == "exit" or (
        event[0] in ("message", "answered") and isinstance(event[2], (protocol.Values, protocol.Error))
    )


def _forget() -> None:
    global _kept
    if _kept is not None:
        kept, _kept = _kept, None
        with contextlib.suppress(OSError):
            kept[1].close()

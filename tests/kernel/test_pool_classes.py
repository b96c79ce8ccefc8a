"""Classes that a context puts before the classes of `multiprocessing`, without a process, over classes of the test."""

from __future__ import annotations

import multiprocessing
import queue
from multiprocessing.context import _concrete_contexts
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.kernel.pools import classes
from nbdist.kernel.pools.classes import WarmPopen, WarmQueue, make


class Empty:
    """A queue of a library, in which nothing comes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waits: list[float | None] = []

    def get(self, block: bool, timeout: float | None) -> Any:
        self.waits.append(timeout)
        raise queue.Empty


class Broken(Empty):
    """A queue of a library whose sender is gone."""

    def get(self, block: bool, timeout: float | None) -> Any:
        raise EOFError


def over(own: type, warm: type, **attributes: Any) -> Any:
    return type("Made", (warm, own), attributes)


def test_a_wait_at_a_queue_ends_when_a_process_has_died() -> None:
    starter = SimpleNamespace(deaths=0)

    class Dying(Empty):
        def get(self, block: bool, timeout: float | None) -> Any:
            starter.deaths += len(self.waits) == 2
            return super().get(block, timeout)

    waiting = over(Dying, WarmQueue, starter=starter)()
    with pytest.raises(queue.Empty):
        waiting.get(timeout=1000.0)
    assert len(waiting.waits) == 3 and set(waiting.waits) == {classes._LOOK}


def test_a_wait_without_a_timeout_is_the_librarys_own() -> None:
    waiting = over(Empty, WarmQueue, starter=SimpleNamespace(deaths=0))()
    with pytest.raises(queue.Empty):
        waiting.get(block=False)
    assert waiting.waits == [None]


def test_a_message_that_is_lost_with_its_sender_raises_when_the_death_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = SimpleNamespace(deaths=0)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        starter.deaths = len(looks) // 3

    monkeypatch.setattr(classes, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    with pytest.raises(EOFError):
        over(Broken, WarmQueue, starter=starter)().get()
    assert len(looks) == 3


def test_a_signal_is_sent_while_the_process_runs_and_marks_the_end_as_asked_for() -> None:
    sent: list[int] = []
    running = SimpleNamespace(asked_to_end=False, signal=sent.append)
    popen = over(object, WarmPopen).__new__(over(object, WarmPopen))
    popen.returncode, popen._running = None, running
    popen._send_signal(15)
    assert sent == [15] and running.asked_to_end
    popen.returncode = 0
    popen._send_signal(9)
    assert sent == [15]


def test_each_class_of_a_context_is_the_librarys_with_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.context._concrete_contexts", dict(_concrete_contexts))
    made = make("multiprocessing")
    assert issubclass(made.Process, multiprocessing.Process.__mro__[1])
    assert made.Process.in_processes is multiprocessing.get_context("fork").Process
    assert type(made.Queue(3)).__mro__[1] is WarmQueue
    assert made.__reduce__() == (multiprocessing.get_context, ("fork",))

"""An interrupt tears no message in two: what waits for the rest of one is handled afterwards."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from calls import press

from nbdist import Session
from nbdist.errors import entry
from nbdist.rank.kernel_channel import KernelChannel
from nbdist.rank.keyboard import Keyboard
from nbdist.rank.world import Membership
from nbdist.system.interrupts import deferred_interrupts
from nbdist.wire.channel import Channel
from nbdist.wire.protocol import Line


@pytest.fixture(autouse=True)
def another_thread() -> Iterator[None]:
    """Run a thread that takes signals which the main one blocks, as a kernel's threads and gloo's do."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next message that is read in this process is interrupted in its middle."""
    some, pressed = Channel._some, []

    def interrupted(self: Channel, size: int) -> bytes:
        if not pressed:
            pressed.append(True)
            press()
        return some(self, size)

    monkeypatch.setattr(Channel, "_some", interrupted)


def test_an_interrupt_waits_for_the_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        press()
        with deferred_interrupts():
            reached.append("inner")
        reached.append("end")
    assert reached == ["inner", "end"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with deferred_interrupts():
        pass


def test_an_interrupt_that_another_thread_received_is_raised() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            press()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        press()
        press()
        pytest.fail("it came too late")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts():
            press()
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_that_python_drops_comes_again() -> None:
    """A press while a finalizer runs, or the callback of the lock of an import."""
    hook = sys.unraisablehook

    class Dropped:
        def __del__(self) -> None:
            press()

    @entry
    def call() -> None:
        Dropped()
        time.sleep(1000)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert sys.unraisablehook is hook


def test_another_thread_changes_nothing() -> None:
    found: list[Any] = []

    def look() -> None:
        with deferred_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_rank_that_reads_a_line(interrupted: None) -> None:
    """The next read gives the next message, and not the rest of this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keyboard, kernel = Keyboard(KernelChannel(theirs, Membership())), Channel(ours)
        kernel.send(Line("typed", ""))
        kernel.send(Line("later", ""))
        with pytest.raises(KeyboardInterrupt):
            keyboard.ask("? ")
        assert keyboard.ask("? ") == "later"


def test_a_notebook_that_reads_an_answer(request: pytest.FixtureRequest) -> None:
    with Session(1) as session:
        pids = session.run_all(os.getpid)
        request.getfixturevalue("interrupted")
        with pytest.raises(KeyboardInterrupt):
            session.run(os.getpid)
        assert session.run_all(os.getpid) == pids


def test_a_notebook_that_sends_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The press is handled after the message: the rank can read it, and leaves the call."""
    send_fds = socket.send_fds

    def interrupted(*args: Any) -> int:
        sent = send_fds(args[0], [b"".join(args[1])[:5]], args[2])
        press()
        return sent

    with Session(1) as session:
        session.run(os.getpid)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(socket, "send_fds", interrupted)
            session.run(os.getpid)
        assert session.run(sum, [1, 2]) == 3

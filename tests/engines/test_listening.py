"""Output of this machine's ranks is read in one place, and passed on."""

from __future__ import annotations

import os
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from nbdist.engines.listening import Listener, drain, pass_on


@pytest.fixture
def rank() -> Any:
    """A rank that writes to one pipe, and what was passed on of it."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    passed: list[tuple[int, int, bytes]] = []
    one = SimpleNamespace(outputs=[(read, -1)], write=write, passed=passed, take=lambda *what: passed.append(what))
    yield one
    os.close(read)
    if one.write >= 0:
        os.close(one.write)


def test_output_is_passed_on_once(rank: Any) -> None:
    assert pass_on(rank, 0, 0, rank.take) is None and rank.passed == []
    os.write(rank.write, b"a line")
    assert pass_on(rank, 0, 0, rank.take) is None
    assert pass_on(rank, 0, 0, rank.take) is None
    assert rank.passed == [(0, 0, b"a line")]


def test_the_end_is_passed_on_as_no_bytes(rank: Any) -> None:
    os.write(rank.write, b"last words")
    os.close(rank.write)
    rank.write = -1
    drain(rank, 0, 0, rank.take)
    assert rank.passed == [(0, 0, b"last words"), (0, 0, b"")]


def test_a_rank_that_writes_on_and_on_lets_others_have_their_turn(rank: Any) -> None:
    def take(number: int, which: int, data: bytes) -> None:
        rank.take(number, which, data)
        os.write(rank.write, b"more")

    os.write(rank.write, b"more")
    assert pass_on(rank, 0, 0, take) is True
    assert len(rank.passed) == 16


def test_a_full_pipe_shortens_the_pause(rank: Any) -> None:
    """A pause in which a pipe would be full becomes shorter, and longer again afterwards."""
    exits, end = os.pipe()
    one = SimpleNamespace(outputs=[(rank.outputs[0][0], exits)], pids=[1], channels=[rank], exits_fd=exits)
    rank.fileno = lambda: exits
    listener = Listener.__new__(Listener)
    with (
        closing(listener),
        patch.object(Listener, "watch", lambda self, fd, action: None),
        patch("nbdist.engines.listening.selectors.DefaultSelector"),
    ):
        Listener.__init__(
            listener, one, on_output=rank.take, on_message=lambda *what: None, on_exit=print, pause=1000.0
        )
        pauses = []
        for size in (100, 64_000, 64_000, 100, 100):
            listener.resume()
            os.write(rank.write, b"x" * size)
            listener._output(0, 0)
            pauses.append(listener.due() or 0.0)
    os.close(exits)
    os.close(end)
    assert sum(len(data) for _, _, data in rank.passed) == 128_300
    assert [round(pause, -2) for pause in pauses] == [1000, 1000, 500, 300, 1000]

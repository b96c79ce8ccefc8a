"""What ranks of this machine write is read in one place, and passed on."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.engines.listening import drain, pass_on


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


def test_what_is_written_is_passed_on_once(rank: Any) -> None:
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

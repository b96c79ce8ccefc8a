"""Causes of failures, groups of exceptions, functions that take away what a rank needs, many calls, many threads."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import logging
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from calls import on, sums

from nbdist import Session, in_ddp
from nbdist.system import limits

#: Python has groups of exceptions since 3.11.
Group: Any = getattr(builtins, "ExceptionGroup", None)


def reset() -> None:
    raise ConnectionResetError(104, "Connection reset by peer: data server")


def fail_in_its_own_way() -> None:
    try:
        sums()
    except BaseException as exc:
        raise ValueError("step 7 failed") from exc


def test_the_cause_is_raised_whatever_its_words(session: Session) -> None:
    for rank in (0, 1):
        with pytest.raises(ConnectionResetError, match="data server"):
            session.run(on, rank, reset, fail_in_its_own_way)


def test_a_cause_that_looks_like_a_consequence_is_raised(session: Session) -> None:
    def fail() -> None:
        raise TypeError("of its own")

    def later() -> None:
        with contextlib.suppress(BaseException):
            sums()
        fail()

    with pytest.raises((TypeError, ConnectionResetError)) as raised:
        session.run(on, 1, reset, later)
    assert "data server" in f"{raised.value} {raised.value.__cause__}"


@pytest.mark.skipif(Group is None, reason="Python has no groups of exceptions")
def test_a_group_of_exceptions_stays_one(session: Session) -> None:
    def fail() -> None:
        bad = ValueError("a")
        bad.rows = (row for row in ())  # type: ignore[attr-defined]
        raise Group("two", [bad, Group("inner", [TypeError("b"), bad])])

    with pytest.raises(BaseException) as raised:
        session.run(fail)
    group: Any = raised.value
    assert isinstance(group, Group) and group.message == "two"
    first, inner = group.exceptions
    assert type(first) is ValueError and isinstance(inner, Group)
    assert [type(one) for one in inner.exceptions] == [TypeError, ValueError]


def test_removed_variables_are_restored_for_the_next_call(session: Session) -> None:
    def clean() -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)

    def change() -> None:
        os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"] = "7", "many", "3"

    for spoil in (clean, change):
        session.run(spoil)
        found = session.run_all(lambda: [dist.get_rank(), os.environ["RANK"], os.environ["WORLD_SIZE"]])
        assert found == [[0, "0", "2"], [1, "1", "2"]]
    assert session.run(lambda: os.environ["OMP_NUM_THREADS"]) == "3", "what else a call sets stays"
    session.restart()
    assert session.run(lambda: os.environ["OMP_NUM_THREADS"]) != "3"


def test_a_mapped_file_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/donn\xe9es.bin")
    try:
        mapped = np.memmap(name, dtype="float32", mode="w+", shape=(5_000_000,))
    except OSError:
        pytest.skip("this file system takes no such name")
    mapped[:] = 1
    big = np.ones(4_000_000)
    assert in_ddp(1, lambda: (float(mapped.sum()), float(big.sum()))) == (5e6, 4e6)


def test_loggers_that_another_thread_makes_meanwhile(session: Session) -> None:
    end = threading.Event()

    def make() -> None:
        for number in itertools.count():
            logging.getLogger(f"made.{number}")
            if end.is_set():
                return

    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert [session.run(max, 1, number) for number in range(2, 22)] == list(range(2, 22))
    finally:
        end.set()
        thread.join()


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 80, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_calls_wait_in_the_background(few_files: None, session: Session) -> None:
    data = np.ones(100_000)
    futures = [session.submit(lambda number: number + data[0], number) for number in range(60)]
    assert sum(future.result() for future in futures) == sum(range(60)) + 60


def test_room_is_made_only_near_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(limits, "allow_open_files", asked.append)
    limits.allow_more_above(5)
    assert not asked
    limits.allow_more_above(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
    assert asked

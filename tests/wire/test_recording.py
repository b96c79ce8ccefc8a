"""Notes of the collectives of ranks, as the kernel reads them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.wire import recording
from nbdist.wire.recording import KEPT, Recorder, Recording, group_named

GROUP = group_named("0", [0, 1])


@pytest.fixture
def kept() -> Iterator[Recording]:
    kept = Recording(2)
    yield kept
    kept.handed_over()


def recorder(kept: Recording, rank: int) -> Recorder:
    assert kept.segment is not None
    return Recorder(os.dup(kept.segment.fd), rank)


def begin(recorder: Recorder, kind: str = "all_reduce", group: str = GROUP, **given: Any) -> int:
    fields: dict[str, Any] = {"elements": 3, "dtype": "float32", "peer": -1, "file": "a.py", "line": 7}
    return recorder.begin(kind, group, **{**fields, "main_thread": True, **given})


def test_the_kernel_reads_recorded_collectives(kept: Recording) -> None:
    own, other = recorder(kept, 0), recorder(kept, 1)
    first = begin(own)
    assert [one.waits for one in kept.read(0)] == [True]
    own.leave(first)
    own.enter(first, main_thread=False)
    (seen,) = kept.read(0)
    assert (seen.waits, seen.main_thread, seen.end, seen.what()) == (True, False, None, "all_reduce of 3 float32")
    own.end(first)
    begin(other, "send", peer=0, elements=-1, dtype="", file="")
    (seen,), (sent,) = kept.read(0), kept.read(1)
    assert seen.end is not None and seen.end >= seen.begin and not seen.waits and not seen.raised
    assert (seen.group, seen.ranks, seen.place_in_group, seen.file, seen.line) == ("0", [0, 1], 1, "a.py", 7)
    assert (sent.place_in_group, sent.peer, sent.file, sent.what()) == (0, 0, "", "send")
    own.end(begin(own), raised=True)
    assert [one.raised for one in kept.read(0)] == [False, True]


def test_the_last_are_kept(kept: Recording) -> None:
    own = recorder(kept, 1)
    for _ in range(KEPT + 10):
        own.end(begin(own))
    assert [one.number for one in kept.read(1)] == list(range(11, KEPT + 11))
    assert kept.count(1) == KEPT + 10 and kept.count(0) == 0 and kept.read(0) == []


def test_each_group_has_its_own_numbers_which_restart_after_a_failure(kept: Recording) -> None:
    own, pair = recorder(kept, 0), group_named("pair", [1, 0])
    for group in (GROUP, pair, GROUP):
        begin(own, group=group)
    assert [(one.group, one.place_in_group) for one in kept.read(0)] == [("0", 1), ("pair", 1), ("0", 2)]
    own.forget_groups()
    assert kept.read(0) == [] and kept.count(0) == 3
    begin(own)
    assert [(one.number, one.place_in_group) for one in kept.read(0)] == [(4, 1)]


def test_texts_that_find_no_room_are_empty(kept: Recording) -> None:
    own = recorder(kept, 0)
    for number in range(100):
        begin(own, file=f"{number:03}" * 400)
    files = [one.file for one in kept.read(0)]
    assert files[0] == "000" * 400 and files[-1] == "" and "" not in files[:30]
    begin(own, kind="ä", file="x" * 100_000)
    assert kept.read(0)[-1].file == ""


def test_threads_may_note_at_the_same_time(kept: Recording) -> None:
    own = recorder(kept, 0)

    def note() -> None:
        for number in range(100):
            own.end(begin(own, file=f"{threading.get_ident()}-{number % 7}"))

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = kept.read(0)
    assert [one.number for one in seen] == list(range(1, 401))
    assert {one.file for one in seen} == {f"{thread.ident}-{k}" for thread in threads for k in range(7)}


def test_a_part_is_as_large_as_pages_want_it() -> None:
    assert recording.SIZE % (64 << 10) == 0
    assert recording._TEXTS < recording.SIZE // 2
    assert recording._ENTRY.size >= recording._FLAGS_AT + 2

"""The journal as a keeper writes it: within its bound, and cut where the disk is full."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.keeper import writing
from nbdist.keeper.writing import Journal
from nbdist.wire.journal import Reader, Record, mapped, numbers


class Disk:
    """A disk that is full as long as `full`: what writes to it gets the bytes in `room`, and then an error. `when_full`
    is called before the error."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full, self.room = False, 0
        self.when_full: Callable[[], Any] = lambda: None
        self._write, self._pwrite = os.write, os.pwrite
        patch.setattr("os.write", lambda fd, data: self._write(fd, self._fitting(data)))
        patch.setattr("os.pwrite", lambda fd, data, at: self._pwrite(fd, self._fitting(data), at))
        patch.setattr("os.statvfs", lambda path: self)
        truncate = os.ftruncate

        def give_back(fd: int, size: int) -> None:
            self.when_full()
            self.room += os.fstat(fd).st_size - size
            truncate(fd, size)

        patch.setattr("os.ftruncate", give_back)
        self.f_frsize = 1

    @property
    def f_bavail(self) -> int:
        return self.room if self.full else 1 << 40

    def _fitting(self, data: Any) -> Any:
        if not self.full:
            return data
        if not self.room:
            self.when_full()
            raise OSError(28, "No space left on device")
        data = memoryview(data)[: self.room]
        self.room -= len(data)
        return data


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def woken() -> list[int]:
    return []


@pytest.fixture
def journal(tmp_path: Path, woken: list[int]) -> Any:
    with contextlib.closing(Journal(str(tmp_path), 1 << 20, lambda: woken.append(1))) as journal:
        yield journal


def heads(folder: Path) -> list[Any]:
    return [(record.kind, record.head) for record in Reader(str(folder)).read()]


def test_only_the_user_can_read_it(journal: Journal, tmp_path: Path) -> None:
    journal.append("text", {"text": "a"})
    journal.keep_value(1, 0, memoryview(b"p"), [memoryview(bytes(2 << 20))])
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_value_comes_back_and_can_be_changed(journal: Journal, tmp_path: Path) -> None:
    big = bytes(range(256)) * (1 << 13)
    assert journal.keep_value(1, 0, memoryview(b"small"), [memoryview(b"abc")])
    assert journal.keep_value(1, 1, memoryview(b"big"), [memoryview(big), memoryview(b"xyz")])
    small, large = [record for record in Reader(str(tmp_path)).read() if record.kind == "value"]
    assert [bytes(buffer) for buffer in small.buffers] == [b"small", b"abc"]
    views = mapped(str(tmp_path / large.head["file"]), large.head["parts"])
    assert [bytes(view) for view in views] == [b"big", big, b"xyz"]
    views[1][0] = 7
    assert bytes(mapped(str(tmp_path / large.head["file"]), large.head["parts"])[1]) == big


def test_what_is_appended_soon_comes_before_what_follows(journal: Journal, tmp_path: Path, woken: list[int]) -> None:
    follows: list[Callable[[], Any]] = [
        lambda: journal.append("output", {"rank": 0, "which": 0}, b"text"),
        lambda: journal.keep_value(1, 0, memoryview(b"p"), []),
        journal.flush,
    ]
    for number, follow in enumerate(follows):
        before = heads(tmp_path)
        journal.append_soon(functools.partial(Record, "begin", {"call": number}))
        assert heads(tmp_path) == before, "not written yet"
        follow()
        assert heads(tmp_path)[len(before)] == ("begin", {"call": number})
    assert woken == [1]


def test_of_what_is_written_together_the_part_that_fits_is_there(journal: Journal, tmp_path: Path, disk: Disk) -> None:
    journal.append("output", {"rank": 0, "which": 0}, b"before")
    journal.append_soon(lambda: Record("begin", {"call": 1}))
    disk.full, disk.room = True, 100
    journal.append("output", {"rank": 0, "which": 0}, b"lost" * 100)
    assert [kind for kind, _ in heads(tmp_path)] == ["output", "begin"]


def test_the_oldest_is_dropped_first(journal: Journal, tmp_path: Path) -> None:
    for call in range(1, 40):
        journal.append("begin", {"call": call})
        journal.append("output", {"rank": 0, "which": 0}, bytes(100_000))
        journal.keep_value(call, 0, memoryview(b"p"), [memoryview(bytes((1 << 20) + call))])
        journal.append("end", {"call": call})
    assert numbers(str(tmp_path))[0] > 1
    assert sum(file.stat().st_size for file in tmp_path.glob("journal-*")) <= 1 << 20
    assert [file.name for file in tmp_path.glob("value-*")] == ["value-00000039-0"], "that of the last call stays"
    assert heads(tmp_path)[-1] == ("end", {"call": 39})


def test_a_call_that_is_stopped_in_the_queue_does_not_drop_values_of_the_running_one(
    journal: Journal, tmp_path: Path
) -> None:
    journal.append("begin", {"call": 1})
    journal.append("begin", {"call": 2})
    journal.append("end", {"call": 2})
    assert journal.keep_value(1, 0, memoryview(b"p"), [memoryview(bytes(2 << 20))])
    assert [file.name for file in tmp_path.glob("value-*")] == ["value-00000001-0"], (
        "larger than the bound, but the last"
    )


def test_a_full_disk_cuts_it(journal: Journal, tmp_path: Path, disk: Disk, woken: list[int]) -> None:
    journal.append("output", {"rank": 0, "which": 0}, b"before")
    disk.full, disk.room = True, 10
    for _ in range(20):
        journal.append("output", {"rank": 0, "which": 0}, b"lost" * 100)
    assert not journal.keep_value(1, 0, memoryview(b"p"), [memoryview(b"abc")])
    assert [kind for kind, _ in heads(tmp_path)] == ["output"]
    journal.append("end", {"call": 1})
    woken.clear()
    disk.full = False
    journal.look()
    assert woken, "the clients have to look"
    kinds = heads(tmp_path)
    assert [kind for kind, _ in kinds] == ["output", "cut", "value", "end"]
    assert "20 records were lost" in kinds[1][1]["why"] and kinds[2][1]["held"]
    journal.append("output", {"rank": 0, "which": 0}, b"after")
    assert heads(tmp_path)[-1][0] == "output"


def test_the_end_of_a_call_has_room_that_was_set_aside(
    journal: Journal, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (tmp_path / "reserve").stat().st_size == writing._RESERVE
    remove = os.remove

    def give_back(name: str) -> None:
        if name.endswith("reserve") and os.path.exists(name):
            disk.room = writing._RESERVE
        remove(name)

    monkeypatch.setattr("os.remove", give_back)
    disk.full = True
    journal.append("output", {"rank": 0, "which": 0}, b"lost")
    journal.append("end", {"call": 1})
    assert [kind for kind, _ in heads(tmp_path)] == ["cut", "end"]


#: Steps. A record of this kind and size is appended, or the room on the disk changes to a number of bytes (None: to
#: any number).
STEPS = st.one_of(
    st.tuples(st.sampled_from(["begin", "output", "text", "end"]), st.integers(0, 300)),
    st.tuples(st.just("room"), st.one_of(st.none(), st.integers(0, 600))),
)


@pytest.mark.parametrize("truncates", [True, False])
@settings(deadline=None, max_examples=100)
@given(steps=st.lists(STEPS, max_size=25))
def test_wherever_it_is_cut_later_records_are_read_whole(truncates: bool, steps: Sequence[tuple[str, Any]]) -> None:
    """A reader that has read one half of a record reads them, too."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        if not truncates:
            patch.setattr("os.ftruncate", fail)
        with contextlib.closing(Journal(folder, 1 << 20, lambda: None)) as journal:
            early, read = Reader(folder), []
            disk.when_full = lambda: read.extend(early.read())
            for number, (kind, size) in enumerate(steps):
                if kind == "room":
                    disk.full, disk.room = size is not None, size or 0
                else:
                    journal.append(kind, {"step": number}, bytes(size))
            disk.full = False
            journal.append("over", {"step": len(steps)})
            read += early.read()
            early.close()
        with contextlib.closing(Reader(folder)) as late:
            assert [(one.kind, one.head) for one in late.read()] == [(one.kind, one.head) for one in read]
    found = [one.head["step"] for one in read if one.kind != "cut"]
    assert found == sorted(set(found)), "in order, and none twice"
    absent = [kind for number, (kind, _) in enumerate(steps) if number not in found and kind != "room"]
    assert not {"begin", "end"} & set(absent), "these are written as soon as there is room"
    counts = [re.search(r"(\d+) records were lost", one.head["why"]) for one in read if one.kind == "cut"]
    assert sum(int(count[1]) for count in counts if count) == len(absent)


def fail(*_: Any) -> None:
    raise OSError(5, "Input/output error")


@pytest.fixture
def largest_file() -> Iterator[int]:
    """The largest size of a file, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield 10_000
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_of_the_size_of_files_cuts_no_later_record(tmp_path: Path, largest_file: int) -> None:
    with contextlib.closing(Journal(str(tmp_path), 1 << 20, lambda: None)) as journal:
        for size in (largest_file - 100, 2 * largest_file, 200, 300):
            journal.append("output", {"rank": 0, "which": 0}, bytes(size))
        journal.append("end", {"call": 1})
    records = list(Reader(str(tmp_path)).read())
    assert [record.kind for record in records] == ["output", "cut", "output", "output", "end"]
    assert [record.buffers[0].nbytes for record in records if record.kind == "output"] == [9900, 200, 300]  # type: ignore[union-attr]


def test_a_write_of_one_half_is_continued(journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes one half of more than two gibibytes, and after some signals."""
    write = os.write
    monkeypatch.setattr("os.write", lambda fd, data: write(fd, data[:7]))
    journal.append("output", {"rank": 0, "which": 0}, b"text" * 10)
    journal.append("end", {"call": 1})
    assert [kind for kind, _ in heads(tmp_path)] == ["output", "end"]

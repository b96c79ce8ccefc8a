"""The records of a journal: whole or absent, however its writer ends, and read while it grows."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from nbdist.wire.journal import Reader, Record, decode, encode, path


def written(*records: Record) -> bytes:
    return b"".join(bytes(part) for record in records for part in encode(record))


def texts(reader: Reader) -> list[str]:
    return [record.head.get("text", record.kind) for record in reader.read()]


def text(number: int) -> Record:
    return Record("text", {"text": str(number)}, [b"x" * (number % 7)])


def test_a_record_comes_back() -> None:
    record = Record("value", {"call": 3, "é": [1.5, None]}, [b"", b"\0\xff" * 5])
    found = decode(written(record, Record("end")))
    assert found is not None
    again, end = found
    assert (again.kind, again.head) == ("value", record.head)
    assert [bytes(buffer) for buffer in again.buffers] == [b"", b"\0\xff" * 5]
    assert not again.buffers[0:1][0].readonly  # type: ignore[union-attr]
    assert decode(written(record, Record("end")), end) is not None


def test_a_journal_that_is_cut_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    data = written(*map(text, range(5)))
    ends = [len(written(*map(text, range(count)))) for count in range(6)]
    for size in range(len(data) + 1):
        Path(path(str(tmp_path), 1)).write_bytes(data[:size])
        whole = sum(size >= end for end in ends) - 1
        assert texts(Reader(str(tmp_path))) == [str(number) for number in range(whole)]


def test_a_damaged_record_is_not_read(tmp_path: Path) -> None:
    data = bytearray(written(text(6)))
    chance = random.Random(0)
    for _ in range(50):
        one = bytearray(data)
        one[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        assert decode(bytes(one)) is None


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, data = str(tmp_path), written(*map(text, range(20)))
    reader = Reader(folder)
    assert texts(reader) == [], "there is no file yet"
    found: list[str] = []
    chance = random.Random(1)
    cuts = [0, *sorted(chance.sample(range(len(data)), 30)), len(data)]
    for start, end in itertools.pairwise(cuts):
        with open(path(folder, 1), "ab") as file:
            file.write(data[start:end])
        found += texts(reader)
    assert found == [str(number) for number in range(20)]
    assert texts(Reader(folder, at_end=True)) == []
    reader.close()


def test_a_reader_that_is_interrupted_reads_nothing_twice(tmp_path: Path) -> None:
    Path(path(str(tmp_path), 1)).write_bytes(written(*map(text, range(5))))
    reader = Reader(str(tmp_path))
    assert next(iter(reader.read())).head["text"] == "0"
    assert texts(reader) == ["1", "2", "3", "4"]


def test_a_reader_goes_from_file_to_file(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for number in (1, 2, 3):
        Path(path(folder, number)).write_bytes(written(text(number)))
    assert texts(Reader(folder)) == ["1", "2", "3"]
    assert texts(Reader(folder, 2)) == ["2", "3"]
    reader = Reader(folder)
    records = reader.read()
    assert next(records).head["text"] == "1"
    os.remove(path(folder, 1))
    os.remove(path(folder, 2))
    rest = list(records)
    assert [record.kind for record in rest] == ["cut", "text"] and rest[-1].head["text"] == "3"


@pytest.mark.parametrize("gone", [(1,), (1, 2), (1, 2, 3)])
def test_the_last_file_may_be_gone(tmp_path: Path, gone: tuple[int, ...]) -> None:
    folder = str(tmp_path)
    for number in (1, 2, 3):
        Path(path(folder, number)).write_bytes(written(text(number)))
    reader = Reader(folder)
    list(reader.read())
    for number in gone:
        os.remove(path(folder, number))
    assert texts(reader) == []

"""Data that a session has sent are not sent again while they are the same; what changed always is."""

from __future__ import annotations

import os
import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import Session
from nbdist.system.segments import same_bytes
from nbdist.wire.cache import KEPT, SentCache
from nbdist.wire.parcel import pack


def segments_of(arrays: list[np.ndarray], cache: SentCache) -> tuple[list[int], list[np.ndarray]]:
    """Pack arrays; the inodes of the segments that hold them, and what a reader gets."""
    parcel = pack(memoryview(b""), [pickle.PickleBuffer(array) for array in arrays], cache)
    inodes = [os.fstat(parcel.segments[span.segment].fd).st_ino for span in parcel.spans]
    wholes = [segment.private() for segment in parcel.segments]
    read = [
        np.frombuffer(wholes[p.segment][p.start : p.start + p.size], array.dtype)
        for p, array in zip(parcel.spans, arrays, strict=True)
    ]
    parcel.close()
    return inodes, read


def test_unchanged_data_is_not_sent_again() -> None:
    cache = SentCache()
    first, second = np.arange(KEPT, dtype=np.uint8), np.arange(KEPT, dtype=np.int64)
    before, _ = segments_of([first, second], cache)
    again, read = segments_of([second, first], cache)
    assert again == before[::-1]
    assert np.array_equal(read[0], second) and np.array_equal(read[1], first)
    second[-1] += 1
    changed, read = segments_of([first, second], cache)
    assert changed[0] == before[0] and changed[1] != before[1]
    assert np.array_equal(read[1], second)
    cache.close()


def test_segments_out_of_use_are_closed() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    cache = SentCache()
    for value in range(5):
        segments_of([np.full(KEPT, value, np.uint8)], cache)
    assert len(os.listdir("/proc/self/fd")) == fds + 1
    segments_of([np.zeros(10, np.uint8)], cache)
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == fds


@settings(max_examples=12, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4), max_size=5))
def test_readers_always_get_what_is_there_now(calls: list[list[tuple[int, int]]]) -> None:
    cache = SentCache()
    for call in calls:
        arrays = [np.full(KEPT + 8 * length, value, np.uint8) for length, value in call]
        _, read = segments_of(arrays, cache)
        assert all(np.array_equal(a, b) for a, b in zip(arrays, read, strict=True))
    cache.close()


@given(st.binary(), st.binary())
def test_same_bytes_compares_buffers(a: bytes, b: bytes) -> None:
    assert same_bytes(memoryview(a), memoryview(b)) == (a == b)
    assert same_bytes(memoryview(a), memoryview(bytes(a)))


def test_same_bytes_on_several_cores() -> None:
    a = np.zeros((32 << 20) + 5, np.uint8)
    for changed in (0, len(a) // 2, len(a) - 1):
        b = a.copy()
        assert same_bytes(memoryview(a), memoryview(b))
        b[changed] = 1
        assert not same_bytes(memoryview(a), memoryview(b))


def test_a_parcel_that_waits_keeps_what_it_has() -> None:
    cache = SentCache()
    waiting = [pack(memoryview(b""), [pickle.PickleBuffer(np.full(KEPT, v, np.uint8))], cache) for v in range(3)]
    cache.close()
    for value, parcel in enumerate(waiting):
        _, (buffer,) = parcel.open()
        assert set(np.frombuffer(buffer, np.uint8)) == {value}


def test_a_session_sees_each_change_and_hides_those_of_ranks() -> None:
    data = np.zeros(300_000)

    def first() -> float:
        return float(data[0])

    def spoil() -> float:
        data[:] = -1
        return float(data[0])

    with Session(2, devices="cpu") as session:
        assert session.run_all(first) == [0.0, 0.0]
        assert session.run_all(spoil) == [-1.0, -1.0]
        assert session.run_all(first) == [0.0, 0.0] and data[0] == 0
        data[0] = 5
        assert session.run_all(first) == [5.0, 5.0]

"""Packed objects are read as they were; big buffers travel once, outside the pickle, and are private to the reader."""

from __future__ import annotations

import collections
import decimal
import functools
import gc
import io
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from conftest import left_in_shared_memory, open_fds, shared_memory_names
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from torch import nn

from nbdist.capture.big_data import OUT_OF_BAND
from nbdist.capture.pickler import Pickler
from nbdist.capture.reading import read
from nbdist.system.segments import Segment
from nbdist.wire.cache import KEPT, SentCache
from nbdist.wire.channel import Channel
from nbdist.wire.parcel import INLINE, MOST_SEGMENTS, Parcel, pack

BIG = 2 * INLINE  # bytes that are not in the pickle, but in a segment


def packed(obj: Any, cache: SentCache | None = None) -> tuple[Parcel, Pickler]:
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(obj)
    return pack(file.getbuffer(), pickler.buffers, cache), pickler


def opened(parcel: Parcel) -> Any:
    pickled, buffers = parcel.open()
    return read(pickled, buffers, originals=[], keep=lambda key, namespace, name: True)


def sent(obj: Any) -> Any:
    """`obj` as a reader gets it."""
    return opened(packed(obj)[0])


def tiled(array: np.ndarray, nbytes: int) -> np.ndarray:
    """Enough copies of `array`, one after another on axis 0, for `nbytes` bytes."""
    return np.concatenate([array] * max(1, -(-nbytes // max(1, array.nbytes))))


# --------------------------------------------------------------------------------------------------- round trips

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
SCALARS |= st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.dates() | st.datetimes()
KEYS = st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    SCALARS,
    lambda inside: (
        st.lists(inside)
        | st.tuples(inside, inside)
        | st.dictionaries(KEYS, inside)
        | st.frozensets(KEYS)
        | st.sets(KEYS)
        | st.builds(collections.deque, st.lists(inside))
        | st.builds(collections.OrderedDict, st.dictionaries(KEYS, inside))
    ),
)


@given(NESTED)
def test_containers(value: Any) -> None:
    got = sent(value)
    assert got == value and type(got) is type(value)


@given(st.integers(0, 3 * INLINE), st.sampled_from([bytes, bytearray]))
def test_bytes_of_any_size(size: int, make: Callable[[bytes], Any]) -> None:
    value = make(b"ab" * (size // 2))
    got = sent([value, value])
    assert got[0] == value and type(got[0]) is make and (got[0] is got[1] or not value)


DTYPES = (
    nps.scalar_dtypes()
    | nps.unicode_string_dtypes(endianness="=")  # numpy's own pickles lose the other one
    | nps.byte_string_dtypes()
    | nps.array_dtypes(nps.scalar_dtypes(), max_size=3)
)


@settings(deadline=None, max_examples=25)
@given(
    DTYPES.flatmap(lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=0, min_side=0, max_dims=4))),
    st.sampled_from(["C", "F", "strided", "reversed", "broadcast"]),
    st.sampled_from([0, OUT_OF_BAND, BIG]),
    st.booleans(),
)
def test_arrays(array: np.ndarray, order: str, nbytes: int, writeable: bool) -> None:
    if array.ndim and nbytes:
        array = tiled(array, nbytes) if array.nbytes else array
    if order in ("C", "F"):
        array = np.array(array, order=order)
    elif array.ndim:
        array = {
            "strided": array[::2],
            "reversed": array[..., ::-1],
            "broadcast": np.broadcast_to(array[:1], array.shape),
        }[order]
    array.flags.writeable = writeable and array.flags.writeable
    got = sent(array)
    assert got.dtype == array.dtype and got.shape == array.shape
    assert got.tolist() == array.tolist() or repr(got) == repr(array)  # NaN and NaT, also in records, equal nothing
    if order == "F" and array.ndim > 1:
        assert got.flags.f_contiguous == array.flags.f_contiguous
    if order in ("C", "F") and array.dtype.names is None:
        assert got.flags.writeable == array.flags.writeable


@pytest.mark.parametrize("size", [3, BIG])
def test_arrays_of_objects_and_of_subclasses(size: int) -> None:
    objects = np.empty(size, dtype=object)
    objects[:2] = [{"a": 1}, None]
    masked = np.ma.masked_equal(np.arange(size), 2)
    table = np.rec.fromarrays([np.arange(size), np.arange(size) * 0.5], names="item,score")
    got = sent([objects, masked, table, np.arange(size).astype("M8[s]"), objects])
    assert got[0].tolist() == objects.tolist() and got[0] is got[4]
    assert got[1].mask[2] and (got[1] == masked).all() and type(got[2]) is np.recarray
    assert got[2].score[2] == 1.0 and got[3].dtype == "M8[s]"


@pytest.mark.parametrize("rows", [0, 5, 20_000])
def test_frames(rows: int) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "user": np.arange(rows),
            "rating": rng.random(rows, dtype=np.float32),
            "title": [f"The {i}. Film — “x”" for i in range(rows)],
            "kind": pd.Categorical(np.array(["a", "b"])[np.arange(rows) % 2]),
            "when": pd.date_range("2020-01-01", periods=rows, freq="min", tz="UTC"),
            "maybe": pd.array([None, 1] * (rows // 2) + [2] * (rows % 2), dtype="Int64"),
        },
        index=pd.Index(np.arange(rows) * 2, name="row"),
    )
    got, column, index = sent((frame, frame["rating"], frame.index))
    pd.testing.assert_frame_equal(got, frame)
    pd.testing.assert_series_equal(column, frame["rating"])
    pd.testing.assert_index_equal(index, frame.index)
    if rows:
        got.loc[0, "rating"] = 7.0
        got["new"] = got.user * 2
        assert got.rating.iloc[0] == 7.0 and frame.rating.iloc[0] != 7.0


TORCH_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TORCH_DTYPES += [torch.complex64]


@settings(deadline=None)
@given(
    st.sampled_from(TORCH_DTYPES),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([1, BIG // 64]),
    st.sampled_from(["plain", "transposed", "strided", "offset", "expanded"]),
)
def test_tensors(dtype: torch.dtype, shape: list[int], times: int, how: str) -> None:
    tensor = torch.randint(0, 2, [*shape, times]).to(dtype)
    if how == "transposed":
        tensor = tensor.transpose(0, -1)
    elif how == "strided":
        tensor = tensor[..., ::3]
    elif how == "offset":
        tensor = tensor[..., 1:]
    elif how == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    got = sent(tensor)
    assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert got.storage_offset() == tensor.storage_offset() and torch.equal(got, tensor)


@pytest.mark.parametrize("size", [10, BIG])
def test_views_that_share_memory_still_share_it(size: int) -> None:
    base = torch.zeros(size)
    got, head, odd, same = sent((base, base[:5], base[1::2], base))
    got[3] = 7
    assert same is got and head[3] == 7 and odd[1] == 7 and base[3] == 0
    assert got.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()


@pytest.mark.parametrize("size", [10, BIG])
def test_modules_and_parameters(size: int) -> None:
    model = nn.Sequential(nn.Embedding(size // 2, 2), nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.tied = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    got, opt, leaf = sent((model, optimizer, torch.ones(size, requires_grad=True)))
    assert got.tied is got[0].weight and isinstance(got.tied, nn.Parameter) and got.tied.requires_grad
    assert leaf.requires_grad and leaf.is_leaf
    assert opt.param_groups[0]["params"][0] is got.tied
    for (name, want), (also, value) in zip(model.state_dict().items(), got.state_dict().items(), strict=True):
        assert name == also and torch.equal(want, value)
    got.eval()(torch.tensor([1, 0])).sum().backward()
    opt.step()
    assert not torch.equal(got[1].bias, model[1].bias)


def test_small_tensors_can_be_resized_and_sparse_ones_travel() -> None:
    got, sparse = sent((torch.zeros(3), torch.eye(300).to_sparse()))
    assert got.resize_(1000).shape == (1000,) and torch.equal(sparse.to_dense(), torch.eye(300))


def test_builtin_values_keep_type_and_value() -> None:
    for value in (math.inf, range(5), slice(1, 2), Ellipsis, NotImplemented, int, len, math, np.float32(2), np.random):
        got = sent(value)
        assert got == value and type(got) is type(value)
    rng = np.random.default_rng(3)
    assert sent(rng).random() == rng.random()
    for value in (date.today(), datetime.now(), decimal.Decimal("1.1"), Path("a"), functools.partial(max, 3), 1 << 300):
        assert repr(sent(value)) == repr(value)
    assert not sent(threading.Lock()).locked()


# ------------------------------------------------------------------------------------------------------ segments


@pytest.fixture
def arrays() -> tuple[np.ndarray, torch.Tensor, pd.DataFrame]:
    return np.arange(BIG), torch.arange(BIG), pd.DataFrame({"x": np.arange(BIG), "y": np.ones(BIG)})


def test_big_buffers_are_outside_the_pickle_once(arrays: tuple[Any, ...]) -> None:
    array, tensor, frame = arrays
    parcel, pickler = packed([arrays, arrays, tensor[5:], array, {"again": frame}])
    total = array.nbytes + tensor.nbytes + sum(frame.memory_usage(index=False))
    assert sum(b.raw().nbytes for b in pickler.buffers) == total
    assert len(parcel.segments) == len(pickler.buffers), "each in its own, for there is no cache"
    assert total < parcel.size < total + 16 * 1024
    again, _ = pickled_again = opened(parcel)[:2]
    assert again is pickled_again[1]


def test_small_parcels_have_no_segment() -> None:
    before = open_fds()
    parcel, pickler = packed({"lr": 0.1, "layers": [50, 100], "x": np.arange(100)})
    assert not parcel.segments and not pickler.buffers and open_fds() == before
    assert opened(parcel)["layers"] == [50, 100]


def test_writes_of_a_reader_are_private(arrays: tuple[Any, ...]) -> None:
    parcel, _ = packed(arrays)
    other = Parcel(parcel.inline, parcel.spans, [Segment(os.dup(s.fd), s.size) for s in parcel.segments])
    (a, t, f), (a2, t2, f2) = opened(parcel), opened(other)
    a[0], t[0] = -1, -1
    f.iloc[0, 0] = -1
    assert a[0] == t[0] == f.x[0] == -1
    for array, tensor, frame in (arrays, (a2, t2, f2)):
        assert array[0] == tensor[0] == frame.x[0] == 0


def test_a_segment_has_no_name_and_no_descriptor_once_it_is_read(arrays: tuple[Any, ...]) -> None:
    gc.collect()
    names, fds = shared_memory_names(), open_fds()
    parcel, _ = packed(arrays)
    count = len(parcel.segments)
    assert not left_in_shared_memory(names) and open_fds() == fds + count
    got = opened(parcel)
    parcel.close()
    gc.collect()
    # Each mapping keeps one descriptor of its own, which goes with what was read.
    assert got[0][1] == 1 and open_fds() <= fds + count
    del got
    gc.collect()
    assert open_fds() == fds


def test_data_lives_as_long_as_a_part_of_it(arrays: tuple[Any, ...]) -> None:
    part = sent(arrays)[0][10:20]
    gc.collect()
    np.testing.assert_array_equal(part, np.arange(10, 20))


def test_a_reader_does_not_copy() -> None:
    parcel, _ = packed(np.zeros(1 << 24))  # 128 MB
    before = psutil.Process().memory_info().rss
    got = opened(parcel)
    assert psutil.Process().memory_info().rss - before < 16 << 20 and got.nbytes == 128 << 20


def test_read_only_arrays_stay_read_only() -> None:
    array = np.arange(BIG)
    array.flags.writeable = False
    got, free = sent((array, np.arange(BIG)))
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1
    free[0] = 1


def test_buffers_of_dates_are_outside_the_pickle() -> None:
    dates = pd.date_range("2020-01-01", periods=BIG, freq="s")
    frame = pd.DataFrame({"when": dates, "local": dates.tz_localize("Europe/Rome"), "since": dates - dates[0]})
    parcel, pickler = packed(frame)
    assert sum(b.raw().nbytes for b in pickler.buffers) >= 3 * 8 * BIG
    pd.testing.assert_frame_equal(opened(parcel), frame)


def test_addresses_are_aligned() -> None:
    got = sent([np.zeros(OUT_OF_BAND + i, dtype=np.uint8) for i in range(5)])
    assert [a.ctypes.data % 64 for a in got] == [0] * 5


def test_keeping_one_array_of_an_answer_frees_the_others() -> None:
    """With many of them too: then some lie in one segment, and are copied out of it."""
    for sizes in ([5000, KEPT * 8], [5000] * 3 + [KEPT // 8 + 7] * (MOST_SEGMENTS + 5)):
        arrays = [np.full(size, number, float) for number, size in enumerate(sizes)]
        parcel, _ = packed(arrays)
        whole = parcel.size
        pickled, buffers = parcel.open(own=True)
        got = read(pickled, buffers, originals=[], keep=lambda key, namespace, name: True)
        for own, array in zip(got, arrays, strict=True):
            np.testing.assert_array_equal(own, array)
            own[0] = -1  # writable, and its own
        kept = memory_behind(got[0])
        assert kept < KEPT < whole


def memory_behind(array: Any) -> int:
    """Bytes of the memory that an array keeps."""
    while isinstance(array, np.ndarray):
        array = array.base
    return len(memoryview(array).obj)


def test_a_big_buffer_on_the_way_to_ranks_is_not_kept_with_a_small_one() -> None:
    cache = SentCache()
    parcel, _ = packed([np.ones(5000), np.ones(KEPT), np.ones(KEPT)], cache)
    assert sorted(segment.size for segment in parcel.segments) == [40_000, 16 * KEPT]
    parcel.close()
    cache.close()


def test_segments_are_closed_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    fds = open_fds()
    made = []

    def write(segment: Segment, view: memoryview, position: int) -> None:
        made.append(segment)
        if len(made) == 3:
            raise MemoryError

    monkeypatch.setattr(Segment, "write", write)
    with pytest.raises(MemoryError):
        packed([np.ones(KEPT) for _ in range(5)])
    assert open_fds() == fds


def test_a_cache_sends_again_only_what_has_changed() -> None:
    gc.collect()
    cache, fds = SentCache(), open_fds()
    same, other = np.zeros(KEPT // 8), np.ones(KEPT // 8)

    def new_bytes() -> int:
        parcel, _ = packed([same, other], cache)
        inodes = {os.fstat(segment.fd).st_ino: segment.size for segment in parcel.segments}
        fresh = sum(size for inode, size in inodes.items() if inode not in known)
        known.clear()
        known.update(inodes)
        copy = Parcel(parcel.inline, parcel.spans, [Segment(os.dup(s.fd), s.size) for s in parcel.segments])
        got = opened(copy)
        parcel.close()
        np.testing.assert_array_equal(got, [same, other])
        got[0][:] = 9  # what a reader does to its own is not what the next one gets
        return fresh

    known: set[int] = set()
    assert new_bytes() >= 2 * KEPT
    assert new_bytes() == 0
    other[-1] = 2
    assert KEPT <= new_bytes() < 2 * KEPT
    assert new_bytes() == 0
    cache.close()
    gc.collect()
    assert open_fds() == fds


# ------------------------------------------------------------------------------------------------------ channels


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    a, b = map(Channel, socket.socketpair())
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize("size", [0, 100, 5_000_000])
def test_messages_of_any_size(channels: tuple[Channel, Channel], size: int) -> None:
    a, b = channels
    sender = threading.Thread(target=lambda: [a.send(("call", i, b"x" * size)) for i in range(3)])
    sender.start()
    for i in range(3):
        assert b.receive() == (("call", i, b"x" * size), None, [])
    sender.join()


@pytest.mark.parametrize("count", [10, BIG])
def test_parcels_and_descriptors(channels: tuple[Channel, Channel], tmp_path: Path, count: int) -> None:
    a, b = channels
    gc.collect()
    fds = open_fds()
    with open(tmp_path / "file", "w+") as file:
        parcel, _ = packed(np.arange(count))
        a.send(("call",), parcel, [file.fileno()])
        parcel.close()
        message, received, (fd,) = b.receive()
        assert message == ("call",) and received is not None and not os.get_inheritable(fd)
        os.write(fd, b"through")
        os.close(fd)
        assert (tmp_path / "file").read_text() == "through"
    np.testing.assert_array_equal(opened(received), np.arange(count))
    gc.collect()
    assert open_fds() == fds


def test_a_parcel_is_sent_to_many_readers(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    parcel, _ = packed(np.arange(BIG))
    for _ in range(3):
        a.send(("call",), parcel)
    parcel.close()
    got = [opened(received) for _, received, _ in (b.receive() for _ in range(3)) if received is not None]
    got[0][0] = 5
    assert [x[0] for x in got] == [5, 0, 0]


def test_the_end_of_a_channel(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    a.send(("last",))
    a.sock.sendall(b"half a head"[:5])
    a.close()
    assert b.receive()[0] == ("last",)
    with pytest.raises(EOFError):
        b.receive()
    with pytest.raises(OSError):
        b.send(("nobody", b"x"))


def test_a_body_that_breaks_off_leaves_no_descriptor(channels: tuple[Channel, Channel], tmp_path: Path) -> None:
    a, b = channels
    (tmp_path / "file").touch()
    with open(tmp_path / "file") as file:
        a.send(("call", b"x" * 1000), fds=[file.fileno()])
        whole = open_fds()
        head = socket.recv_fds(b.sock, 4096, 8)
        os.close(head[1][0])
        assert open_fds() == whole
        socket.send_fds(a.sock, [head[0][:500]], [file.fileno()])
        a.close()
        fds = open_fds()
        with pytest.raises(EOFError):
            b.receive()
        assert open_fds() == fds


def test_between_processes(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    code = """
import socket, sys, numpy as np
from nbdist.capture.reading import read
from nbdist.wire.channel import Channel
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
message, parcel, _ = channel.receive()
array = read(*parcel.open(), originals=[], keep=lambda key, namespace, name: True)
array += 1
channel.send(('sum', int(array.sum())))
"""
    array = np.arange(BIG)
    with subprocess.Popen([sys.executable, "-c", code, str(b.fileno())], pass_fds=[b.fileno()]) as reader:
        try:
            b.close()
            parcel, _ = packed(array)
            a.send(("call",), parcel)
            parcel.close()
            assert a.receive()[0] == ("sum", int(array.sum()) + BIG)
            assert reader.wait() == 0
        finally:
            reader.kill()
    assert array[0] == 0


def test_garbage_with_buffers_is_collected_safely() -> None:
    """A memoryview freed in a cycle of garbage while it has a PickleBuffer crashed the interpreter."""
    code = """
import gc, io, torch
from nbdist.capture.pickler import Pickler
for _ in range(50):
    pickler = Pickler(io.BytesIO())
    pickler.dump([torch.nn.Linear(3, 3), torch.zeros(100_000)])
    pickler.itself = pickler
    del pickler
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr

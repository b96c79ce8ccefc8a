"""Data that are mapped from files: ranks open the files again, nothing is copied, and what cannot be opened is said."""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import LINUX

from nbdist import NbdistError, Session
from nbdist.capture import mapped
from nbdist.capture.call import capture_call
from nbdist.wire.cache import SentCache

pytestmark = pytest.mark.skipif(not LINUX, reason="where data lie is read from /proc")

RANKS = 1
ROWS = 3 << 20  # of eight bytes: more than is worth a look


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A file with a header of 5000 bytes and the numbers from 0 on."""
    path = tmp_path / "some numbers.bin"
    path.write_bytes(bytes(5000) + np.arange(ROWS).tobytes())
    return path


def sent(*args: Any) -> int:
    """Bytes that a call with these arguments sends."""
    call = capture_call(len, args, {}, "", {}, SentCache())
    with_size = call.parcel.size
    call.parcel.close()
    return with_size


def look(array: Any) -> tuple[Any, ...]:
    attributes = [getattr(array, name, None) for name in ("filename", "mode", "offset")]
    return type(array).__name__, array.dtype, array.shape, array.strides, array.flags.writeable, *attributes


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize(
    "part",
    [
        lambda a: a,
        lambda a: a[100:-7],
        lambda a: a[::-3],
        lambda a: a[: ROWS // 4 * 4].reshape(-1, 4)[:, 1:3].T,
        lambda a: a[: ROWS // 2 * 2].view("i4,f8,i4"),
        lambda a: a[5:6],
        lambda a: a.view("M8[s]"),
    ],
    ids=["whole", "slice", "backwards", "two dimensions", "records", "small", "dates"],
)
def test_a_memmap_is_opened_again(mode: Any, part: Callable[[Any], Any], numbers: Path, session: Session) -> None:
    array = part(np.memmap(numbers, np.int64, mode, offset=5000))
    assert sent(array) < 10_000
    kind, *found = session.run(look, array)
    assert kind == "memmap" and found[:4] == list(look(array)[1:5])
    assert found[4:6] == [str(numbers), mode] and 5000 <= found[6] < 5000 + 8 * ROWS
    assert np.array_equal(session.run(np.array, array), array)


def test_writes_of_ranks_to_a_memmap_follow_its_mode(numbers: Path, session: Session) -> None:
    def write(array: Any) -> None:
        array[7] = -1

    shared = np.memmap(numbers, np.int64, "r+", offset=5000)
    session.run(write, shared)
    assert shared[7] == -1
    private = np.memmap(numbers, np.int64, "c", offset=5000)
    session.run(write, private[100:])
    assert shared[107] == 107
    with pytest.raises(ValueError, match="read-only"):
        session.run(write, np.memmap(numbers, np.int64, "r", offset=5000))


def test_a_file_that_was_made_by_mapping_it_is_not_made_again(tmp_path: Path, session: Session) -> None:
    array = np.memmap(tmp_path / "new.bin", np.int64, "w+", shape=ROWS)
    array[:] = 5
    assert sent(array) < 10_000 and session.run(np.sum, array) == 5 * ROWS and array[0] == 5


def test_plain_arrays_and_frames_on_a_memmap(numbers: Path, session: Session) -> None:
    import pandas as pd

    mapped = np.memmap(numbers, np.int64, "r", offset=5000)
    frame = pd.DataFrame({"a": np.asarray(mapped)}, copy=False)
    for data in (np.asarray(mapped)[1:], mapped.view(np.ndarray), frame):
        assert sent(data) < 10_000
        assert session.run(lambda x: int(np.asarray(x).sum()), data) == ROWS * (ROWS - 1) // 2
    assert sent(np.asarray(mapped)[:100]) < 10_000 and sent(np.array(mapped)) > 8 * ROWS


def test_mapped_arrow_data(tmp_path: Path, session: Session) -> None:
    table = pa.table({"x": np.arange(ROWS), "y": pa.array(["a", "bc"] * (ROWS // 2))})
    path = str(tmp_path / "table.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    del table
    with pa.memory_map(path) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
    small = sum(b.size for b in table["y"].chunks[0].buffers() if b is not None and b.size < 16 << 20)
    assert sent(table) < 20_000 + small
    assert session.run(lambda t: (t.slice(3, 2).to_pylist(), t.num_rows), table) == (
        [{"x": 3, "y": "bc"}, {"x": 4, "y": "a"}],
        ROWS,
    )
    assert session.run(lambda t: t.equals(t), table)


def test_mapped_tensors(tmp_path: Path, numbers: Path, session: Session) -> None:
    def write(tensor: torch.Tensor) -> float:
        tensor[1] = 9
        return float(tensor.sum())

    path = str(tmp_path / "shared.bin")
    shared = torch.from_file(path, shared=True, size=100)
    shared[:] = 1
    assert session.run(write, shared) == 108.0 and shared[1] == 9
    private = torch.from_file(str(numbers), shared=False, size=ROWS, dtype=torch.int64)
    torch.save({"weight": torch.arange(ROWS)}, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", mmap=True)["weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_numpy = torch.from_numpy(np.memmap(numbers, np.int64, "r", offset=5000))
    for tensor in (private, loaded, of_numpy):
        assert sent(tensor) < 10_000
        assert session.run(lambda t: t.sum().item(), tensor) == tensor.sum().item()
        session.run(write, tensor)
    assert loaded[1] == of_numpy[1] == 1


@pytest.mark.parametrize("how", ["deleted", "replaced", "changed"])
def test_a_memmap_that_cannot_be_opened_again_is_copied_with_a_warning(
    how: str, numbers: Path, session: Session
) -> None:
    array = np.memmap(numbers, np.int64, "c", offset=5000)
    if how == "deleted":
        os.remove(numbers)
    elif how == "replaced":
        other = numbers.with_name("other")
        other.write_bytes(bytes(5000 + 8 * ROWS))
        os.replace(other, numbers)
    else:
        array[:2] = [70, 71]
    with pytest.warns(UserWarning, match=r"0\.03 GB is mapped .* is sent as a copy .* deleted or replaced"):
        assert session.run(lambda a: (int(a[1]), int(a[2])), array) == (71 if how == "changed" else 1, 2)


def test_lost_writes_to_a_small_file_are_told(tmp_path: Path, session: Session) -> None:
    array = np.memmap(tmp_path / "deleted", np.int64, "w+", shape=(100,))
    os.remove(tmp_path / "deleted")
    with pytest.warns(UserWarning, match="is sent as a copy .* What ranks write there stays in the ranks"):
        assert session.run(len, array) == 100


@pytest.mark.parametrize("name", ["two\nlines", r"a \012 in it", "data (deleted)"])
def test_files_with_names_that_the_system_writes_in_another_way(name: str, tmp_path: Path, session: Session) -> None:
    array = np.memmap(tmp_path / name, np.int64, "w+", shape=(100,))

    def write() -> None:
        array[0] = 5

    session.run(write)
    assert array[:2].tolist() == [5, 0]


def test_a_file_that_a_rank_does_not_find_is_named(numbers: Path, session: Session) -> None:
    array = np.memmap(numbers, np.int64, "r", offset=5000)
    with pytest.raises(NbdistError, match=r"mapped .*some numbers.bin, and this rank on .* cannot .*numpy.array"):
        session.run(len, _Removing(numbers), array)


class _Removing:
    """Removes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.remove, (str(self._path),)


def test_a_memmap_is_returned_as_a_copy(numbers: Path, session: Session) -> None:
    mapped = np.memmap(numbers, np.int64, "r", offset=5000)
    back = session.run(lambda a: a, mapped)
    os.remove(numbers)
    assert np.array_equal(back, mapped)


@pytest.fixture
def in_shm() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_file_in_dev_shm_is_opened_again(in_shm: Path, session: Session) -> None:
    numbers = np.memmap(in_shm / "x", dtype="float32", mode="w+", shape=(1000,))
    tensor = torch.from_file(str(in_shm / "y"), shared=True, size=1000)

    def write() -> None:
        numbers[0] = tensor[1] = 5

    session.run(write)
    assert numbers[:2].tolist() == [5.0, 0.0] and tensor[:2].tolist() == [0.0, 5.0]


def test_memory_that_a_library_shares_in_dev_shm_is_copied(in_shm: Path, session: Session) -> None:
    """The memory of multiprocessing's `SharedMemory`, for example: a write of a rank stays in the rank."""
    with open(in_shm / "z", "w+b") as file:
        file.truncate(mapped.LEAST)
        memory = mmap.mmap(file.fileno(), mapped.LEAST)
    array = np.frombuffer(memory, dtype=np.uint8)

    def write() -> int:
        array[0] = 5
        return int(array[0])

    assert session.run(write) == 5 and array[0] == 0

"""Loaders: the union over ranks is the input, steps are aligned, orders agree and differ, what is wrong is said."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbdist.recsys.io import footers
from nbdist.recsys.io.partition import REMAINDERS
from nbdist.recsys.io.permutation import Permutation
from nbdist.recsys.loader import MemoryLoader, ParquetLoader, adapter, loaders, order, prefetch
from nbdist.recsys.loader import batches as batching
from nbdist.recsys.loader.base import Loader
from nbdist.recsys.loader.columns import Ragged, keyed_jagged
from nbdist.recsys.loader.keyed import Keyed
from nbdist.recsys.loader.parquet import ParquetFiles

CPU = torch.device("cpu")


def table(rows: int, first: int = 0) -> pa.Table:
    """Rows that can be distinguished, the same from every column: `row`, and lists of `row % 4` numbers."""
    row = np.arange(first, first + rows)
    return pa.table(
        {
            "row": row,
            "small": (row % 100).astype(np.uint16),
            "score": row.astype(np.float32) / 2,
            "liked": row % 3 == 0,
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(row, 2)), 2),
            "genres": pa.array([[r * 10 + k for k in range(r % 4)] for r in row.tolist()], pa.list_(pa.int64())),
        }
    )


def check(batch: dict[str, Any]) -> list[int]:
    """The rows of a batch, after a look whether its columns belong together."""
    row = batch["row"]
    assert batch["small"].dtype == torch.uint16 and batch["small"].tolist() == (row % 100).tolist()
    assert batch["score"].dtype == torch.float32 and torch.equal(batch["score"], row / 2)
    assert batch["liked"].dtype == torch.bool and torch.equal(batch["liked"], row % 3 == 0)
    assert torch.equal(batch["pair"], torch.stack([row, row], 1))
    genres = batch["genres"]
    assert isinstance(genres, Ragged) and genres.offsets[0] == 0 and torch.equal(genres.lengths, row % 4)
    lists = [values.tolist() for values in genres.values.tensor_split(genres.offsets[1:-1])]
    assert lists == [[r * 10 + k for k in range(r % 4)] for r in row.tolist()]
    return list(row.tolist())


def epoch(one: Loader) -> list[list[int]]:
    return [check(batch) for batch in one]


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "rows": draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any)),
        "group": draw(st.integers(1, 50)),
        "world": draw(st.integers(1, 5)),
        "batch_size": draw(st.integers(1, 30)),
        "shuffle": draw(st.booleans()),
        "remainder": draw(st.sampled_from(REMAINDERS)),
        "seed": draw(st.integers(-5, 2**63)),
        "prefetch": draw(st.sampled_from([0, 1, 3])),
        "whole": draw(st.booleans()),
        "block": draw(st.sampled_from([1, 500, 1 << 22])),
        "window": draw(st.sampled_from([1, 2000, 5000])),
    }


#: Settings with which the second rank repeats a row in the second step.
UNEVEN = {
    "rows": [3],
    "group": 1,
    "world": 2,
    "batch_size": 1,
    "shuffle": False,
    "seed": 0,
    "prefetch": 0,
    "whole": False,
    "window": 1,
}


def write(folder: Path, counts: list[int], group: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    first = 0
    for number, rows in enumerate(counts):
        pq.write_table(table(rows, first), folder / f"{number}.parquet", row_group_size=group)
        first += rows
    return folder


def stream(one: ParquetLoader, window: int) -> ParquetLoader:
    """Make a loader of a small file do what it does with a large one."""
    one.whole, one.window = False, window
    return one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parquet")


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "nbdist loader"]


def check_epochs(make: Any, s: dict[str, Any]) -> None:
    """Check what holds for any loader over the rows 0 .. total - 1, made with a rank by `make`."""
    total, world, batch_size = sum(s["rows"]), s["world"], s["batch_size"]
    try:
        ranks = [make(rank) for rank in range(world)]
    except ValueError as error:
        assert "cannot be divided among" in str(error) or "do not fill one batch" in str(error)
        return
    first, second = ([epoch(one) for one in ranks] for _ in range(2))
    partition = ranks[0].partition
    for batches in (first, second):
        assert {len(one) for one in batches} == {len(one) for one in ranks} == {partition.steps}
        for rank, one in enumerate(batches):
            assert [len(batch) for batch in one] == [partition.size(rank, step) for step in range(partition.steps)]
        dealt = [
            r
            for rank, one in enumerate(batches)
            for i, b in enumerate(one)
            for r in b[: partition.size_without_repeats(rank, i)]
        ]
        if s["remainder"] == "drop":
            assert len(dealt) == len(set(dealt)) == total - total % (world * batch_size)
            assert set(dealt) <= set(range(total))
        else:
            assert sorted(dealt) == list(range(total))
        if not s["shuffle"]:
            assert dealt == sorted(dealt)
    if s["shuffle"] and total > 30:
        assert first != second or s["remainder"] == "drop"
    for one in ranks:
        one.set_epoch(1)
    assert [epoch(one) for one in ranks] == second, "seed and epoch give the order"


@given(settings_of())
@settings(max_examples=15, deadline=None)
def test_parquet_for_any_files_row_groups_ranks_and_batches(folder: Path, s: dict[str, Any]) -> None:
    write(folder, s["rows"], s["group"])
    options = {name: s[name] for name in ("shuffle", "remainder", "seed", "prefetch")}

    def make(rank: int) -> ParquetLoader:
        one = ParquetLoader(folder, s["batch_size"], rank=rank, world_size=s["world"], **options)
        return one if s["whole"] else stream(one, s["window"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "BLOCK_BYTES", s["block"])
        check_epochs(make, s)


@given(settings_of())
@settings(max_examples=15, deadline=None)
def test_memory_for_any_rows_ranks_and_batches(s: dict[str, Any]) -> None:
    data = table(sum(s["rows"]))
    options = {name: s[name] for name in ("shuffle", "remainder", "seed", "prefetch")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "BLOCK_BYTES", s["block"])
        check_epochs(lambda rank: MemoryLoader(data, s["batch_size"], rank=rank, world_size=s["world"], **options), s)


@given(settings_of(), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_state_goes_on_in_mid_epoch(folder: Path, s: dict[str, Any], after: int) -> None:
    write(folder, s["rows"], s["group"])

    def make(seed: int) -> ParquetLoader:
        options = {"shuffle": s["shuffle"], "remainder": "pad", "prefetch": s["prefetch"]}
        one = ParquetLoader(folder, s["batch_size"], rank=s["world"] - 1, world_size=s["world"], seed=seed, **options)
        return one if s["whole"] else stream(one, s["window"])

    whole = make(s["seed"])
    expected = epoch(whole) + epoch(whole)
    one = make(s["seed"])
    after %= len(expected)
    seen: list[list[int]] = []
    state = one.state_dict()
    while len(seen) < after:
        for batch in one:
            seen.append(check(batch))
            if len(seen) == after:
                state = one.state_dict()
                break
    other = make(s["seed"] + 1)
    other.load_state_dict(json.loads(json.dumps(state)))
    while len(seen) < len(expected):
        seen += epoch(other)
    assert seen == expected


@given(settings_of(), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 9)), max_size=3))
@example(s=UNEVEN, turns=[(2, 1, 1)])
@settings(max_examples=10, deadline=None)
def test_a_state_goes_on_among_other_ranks(folder: Path, s: dict[str, Any], turns: list[tuple[int, int, int]]) -> None:
    """Each row of an epoch comes once when one number of ranks after the other goes on with it."""
    write(folder, s["rows"], s["group"])

    def make(world: int, batch_size: int) -> list[Any]:
        options = {"shuffle": s["shuffle"], "remainder": "pad", "prefetch": s["prefetch"], "seed": s["seed"]}
        ones = [ParquetLoader(folder, batch_size, rank=r, world_size=world, **options) for r in range(world)]
        return [one if s["whole"] else stream(one, s["window"]) for one in ones]

    seen: list[int] = []
    ones = make(s["world"], s["batch_size"])
    for world, batch_size, steps in [*turns, (1, 7, 10**9)]:
        steps = min(steps, len(ones[0]))
        for one in ones:
            for _, batch in zip(range(steps), one, strict=False):
                rows = check(batch)
                seen += rows[: len(rows) - one.repeats]
        states = [json.loads(json.dumps(one.state_dict())) for one in ones]
        assert all(state == states[0] for state in states)
        if states[0]["epoch"]:
            break
        ones = make(world, batch_size)
        for one in ones:
            one.load_state_dict(states[0])
    assert sorted(seen) == list(range(sum(s["rows"])))


def test_too_few_rows_for_a_step_of_all_ranks_are_left_out() -> None:
    one = MemoryLoader(table(10), 3, seed=1)
    for _, _ in zip(range(3), one, strict=False):
        pass
    other = MemoryLoader(table(10), 3, rank=0, world_size=2)
    other.load_state_dict(one.state_dict())
    assert not other.begun_elsewhere and other.state_dict()["epoch"] == 1


def test_resumed_parquet_reads_only_what_is_still_to_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stream(ParquetLoader(write(folder, [100], 10), 5, shuffle=True, seed=1, prefetch=0), 1)
    for _, _ in zip(range(13), one, strict=False):
        pass
    state = one.state_dict()
    read: list[int] = []
    original = ParquetFiles.read

    def counting(self: ParquetFiles, *args: Any) -> Any:
        read.append(len(args[0]))
        return original(self, *args)

    monkeypatch.setattr(ParquetFiles, "read", counting)
    one.load_state_dict(state)
    assert len(epoch(one)) == 20 - 13
    assert len(read) in (4, 5), "of ten or eleven windows, the last"


def test_a_state_of_something_else_is_refused(folder: Path) -> None:
    one = ParquetLoader(write(folder, [50], 10), 5, seed=1)
    state = one.state_dict()
    with pytest.raises(ValueError, match="input"):  # other windows are another order
        stream(ParquetLoader(folder, 5, seed=1), 100).load_state_dict(state)
    for change in ({"remainder": "pad"}, {"input": "x"}, {"shuffle": True}):
        with pytest.raises(ValueError, match=f"the state is of a loader with {next(iter(change))}="):
            one.load_state_dict({**state, **change})


def test_a_new_iteration_starts_after_a_break() -> None:
    one = MemoryLoader(table(100), 7, shuffle=True, seed=0, prefetch=2)
    first = epoch(one)
    one.set_epoch(0)
    for batch in one:
        assert check(batch) == first[0]
        break
    assert epoch(one) == first != epoch(one)


def test_shuffles_of_a_stream_mix_files_and_ranks(folder: Path) -> None:
    one = stream(ParquetLoader(write(folder, [200, 200], 20), 50, shuffle=True, rank=0, world_size=2, seed=3), 6000)
    rows = [row for batch in epoch(one) for row in batch]
    assert {row < 200 for row in rows} == {True, False}
    assert rows != sorted(rows) and set(rows) != {row for batch in epoch(one) for row in batch}


# --- what data may be ---


def test_tensors_are_neither_copied_nor_changed_in_kind() -> None:
    x, y = torch.arange(20).reshape(10, 2), np.arange(10, dtype=np.float16)
    one = MemoryLoader((x, y), 4)
    batches = list(one)
    assert all(isinstance(batch, tuple) for batch in batches)
    assert torch.equal(torch.cat([batch[0] for batch in batches]), x)
    assert batches[0][1].dtype == torch.float16 and [len(batch[1]) for batch in batches] == [4, 4, 2]
    batches[0][0].zero_()
    assert x[0, 1] == 1, "a batch may be written to"
    x[0, 0] = 7
    assert next(iter(one))[0][0, 0] == 7


@pytest.mark.parametrize("array", [np.asfortranarray, lambda rows: pd.DataFrame(rows).to_numpy(), torch.tensor])
def test_rows_that_lie_scattered_in_memory_are_brought_together_once(array: Any) -> None:
    rows = np.arange(6_000).reshape(3_000, 2)
    loader = MemoryLoader((array(rows),), 1_000, shuffle=True)
    assert loader.table["0"][0].is_contiguous()
    assert sorted(map(tuple, torch.cat([batch for (batch,) in loader]).tolist())) == list(map(tuple, rows.tolist()))


def test_frames() -> None:
    pandas = pd.DataFrame({"row": [1, 2, 3], "score": [0.5, float("nan"), 1], "genres": [[1], [], [2, 3]]})
    frame = pl.DataFrame({"row": [1, 2, 3], "score": [0.5, float("nan"), 1], "genres": [[1], [], [2, 3]]})
    for data in (pandas, frame, frame.to_arrow(), frame.to_arrow().to_reader()):
        (batch,) = MemoryLoader(data, 3)
        assert batch["row"].tolist() == [1, 2, 3] and batch["score"].isnan().tolist() == [False, True, False]
        assert batch["genres"].offsets.tolist() == [0, 1, 1, 3] and batch["genres"].values.tolist() == [1, 2, 3]
    codes = pl.DataFrame({"code": pl.Series([3, 2**32 - 1, 1], dtype=pl.UInt32)})
    (batch,) = MemoryLoader(codes, 3, shuffle=True)
    assert batch["code"].dtype == torch.uint32 and sorted(batch["code"].tolist()) == [1, 3, 2**32 - 1]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"a": torch.arange(3), "b": torch.arange(4)}, ValueError, "got 4 in 'b' and 3 in 'a'"),
        ({"a": {1, 2}}, TypeError, "'a' is a set"),
        ({"a": torch.tensor(1)}, TypeError, "'a' is a Tensor"),
        ({}, ValueError, "no columns"),
        (5, TypeError, "of a int"),
        ({"a": torch.arange(0)}, ValueError, "`rows` must be at least 1, got 0"),
        ({"a": Ragged(torch.arange(3), torch.tensor([0, 2]))}, ValueError, "'a': offsets"),
        (pa.table({"a": ["x"]}), ValueError, "the table: column 'a' is string.*categorify"),
        (pl.DataFrame({"a": [1, None]}), ValueError, r"the frame: column 'a' has 1 null\(s\)"),
        (pl.DataFrame({"a": [[1], [None]]}), ValueError, r"column 'a' has lists with 1 null\(s\)"),
        (pd.DataFrame({"a": ["x", "y"]}), ValueError, "the frame: column 'a' is .*string"),
        (pl.DataFrame({"a": [[["x"]]]}), ValueError, "column 'a' is"),
        (pd.DataFrame({"a": [1, "x"]}), TypeError, "the frame: column 'a' must be of numbers, or of lists of them: "),
        (pl.DataFrame({"a": [1]}, {"a": pl.Int128}), TypeError, "the frame: column 'a' must be of numbers"),
        ({"a": np.array(["x"])}, TypeError, "column 'a' is a ndarray of <U1"),
    ],
)
def test_data_that_has_no_batches_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MemoryLoader(data, 2)


def test_slices_and_empty_lists() -> None:
    (batch,) = MemoryLoader(table(50).slice(20, 9), 9, shuffle=True, seed=0)
    assert sorted(check(batch)) == list(range(20, 29))
    empty = pa.table({"genres": pa.array([[], [], []], pa.large_list(pa.int32()))})
    (batch,) = MemoryLoader(empty, 3, shuffle=True)
    assert batch["genres"].values.dtype == torch.int32 and batch["genres"].offsets.tolist() == [0, 0, 0, 0]


def test_a_batch_that_is_written_to_is_of_no_concern_to_a_graph_of_another() -> None:
    weight, losses = torch.ones(1, requires_grad=True), []
    for (rows,) in MemoryLoader((torch.arange(4.0),), 2):
        rows += 1
        losses.append((rows * weight).sum())
    torch.stack(losses).sum().backward()
    assert weight.grad == 1 + 2 + 3 + 4


def test_small_batches_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, taken = 2 * batching.BLOCK_BATCHES + 3, []
    take = batching.take
    monkeypatch.setattr(batching, "take", lambda column, index, _: [taken.append(len(index)), take(column, index)][1])
    assert [batch.item() for (batch,) in MemoryLoader((torch.arange(rows),), 1)] == list(range(rows))
    assert taken == [batching.BLOCK_BATCHES] * 2 + [3]


def test_keyed_ahead_is_what_is_made_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchrec")
    monkeypatch.setattr(batching, "BLOCK_BYTES", 1000)  # several batches in some blocks, one in others
    keys = ["row", "genres", "small"]
    pq.write_table(table(100), tmp_path / "rows.parquet", row_group_size=17)
    makers: list[str] = []
    make = Keyed.make
    monkeypatch.setattr(Keyed, "make", lambda *args: [makers.append(threading.current_thread().name), make(*args)][1])
    for options in ({}, {"shuffle": True, "seed": 1}, {"remainder": "pad", "rank": 1, "world_size": 3}):
        for build, source in ((MemoryLoader, table(100)), (ParquetLoader, tmp_path / "rows.parquet")):
            ahead, plain = (build(source, 7, keyed=keyed, **options) for keyed in (keys, ()))
            for batch, other in zip(ahead, plain, strict=True):
                assert check(batch) == check(other)
                made, wanted = keyed_jagged(batch, keys), keyed_jagged({k: _wide(other[k]) for k in keys}, keys)
                assert keyed_jagged(batch, keys) is made and made.values().dtype == torch.int32
                assert made.keys() == keys and made.stride() == len(batch["row"])
                assert made.length_per_key() == wanted.length_per_key()
                assert torch.equal(made.values(), wanted.values()) and torch.equal(made.lengths(), wanted.lengths())
                assert keyed_jagged(batch, ["row"]).keys() == ["row"]
            assert set(makers) == ({"MainThread"} if build is MemoryLoader else {"nbdist loader"})
            makers.clear()


def _wide(column: Any) -> Any:
    return column._replace(values=column.values.long()) if isinstance(column, Ragged) else column.long()


def test_keyed_ahead_of_columns_that_are_changed() -> None:
    pytest.importorskip("torchrec")
    keys = ["row", "genres"]
    for number, batch in enumerate(MemoryLoader(table(12), 4, keyed=keys)):
        made = keyed_jagged(batch, keys)
        assert made["row"].values().tolist() == list(range(4 * number, 4 * number + 4))
        if number == 1:
            batch["row"] = batch["row"] + 1
        elif number == 2:
            batch["genres"].values.add_(1)
        again = keyed_jagged(batch, keys)
        assert (again is made) == (number == 0)
        assert torch.equal(again["row"].values().long(), batch["row"])
        assert torch.equal(again["genres"].values().long(), batch["genres"].values)


def test_keyed_of_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="`keyed` must name columns, got 'movie'; there are row, small"):
        MemoryLoader(table(4), 2, keyed=["row", "movie"])
    with pytest.raises(ValueError, match="`keyed` must name columns, got 'row'; there are none"):
        MemoryLoader((torch.arange(4),), 2, keyed="row")
    for column, says in (("score", "torch.float32"), ("liked", "torch.bool"), ("pair", r"shape \(2, 2\)")):
        with pytest.raises(ValueError, match=says):
            list(MemoryLoader(table(2), 2, keyed=[column]))
    with pytest.raises(ValueError, match=r"ids below 2\*\*31, got 'user' with the id 2147483648"):
        list(MemoryLoader({"user": torch.tensor([1, 2**31])}, 2, keyed=["user"]))


def test_transform_and_keyed_jagged() -> None:
    pytest.importorskip("torchrec")  # it has no release for every Python; nothing else here needs it
    keys = ["genres", "row"]
    one = MemoryLoader(table(10), 4, transform=lambda batch: (keyed_jagged(batch, keys), batch["score"]))
    kjt, score = next(iter(one))
    assert kjt.keys() == keys and score.tolist() == [0, 0.5, 1, 1.5]
    assert kjt["genres"].lengths().tolist() == [0, 1, 2, 3] and kjt["row"].values().tolist() == [0, 1, 2, 3]
    batch = next(iter(MemoryLoader(table(10), 4)))
    for names, message in ((["title"], "no column 'title'"), (["pair"], "shape"), (["row", "small"], "uint16")):
        with pytest.raises(ValueError, match=message):
            keyed_jagged(batch, names)


# --- files ---


def test_columns_are_chosen_and_read_in_that_order(folder: Path) -> None:
    write(folder, [10], 4)
    for files in (folder, folder / "0.parquet", str(folder / "*.parquet"), [folder / "0.parquet"]):
        (batch,) = ParquetLoader(files, 10, columns=["genres", "row"])
        assert list(batch) == ["genres", "row"] and len(batch["row"]) == 10


def test_wrong_files_are_named(tmp_path: Path) -> None:
    good = tmp_path / "a.parquet"
    pq.write_table(table(10), good)

    def refused(message: str, other: pa.Table | bytes | None = None, error: Any = ValueError, **options: Any) -> None:
        path = tmp_path / "b.parquet"
        if isinstance(other, bytes):
            path.write_bytes(other)
        elif other is not None:
            pq.write_table(other, path)
        with pytest.raises(error, match=message):
            ParquetLoader(options.pop("files", [good, path] if other is not None else good), 2, **options)

    refused("nothing.parquet: no such file", error=FileNotFoundError, files=tmp_path / "nothing.parquet")
    (tmp_path / "empty").mkdir()
    refused(r"empty: the folder has no \*.parquet", error=FileNotFoundError, files=tmp_path / "empty")
    refused("must name at least one file", files=[])
    refused("a.parquet: column 'title' must be in the file once, got 0 times", columns=["title"])
    refused("no columns", columns=[])
    refused("b.parquet: not a whole Parquet file", good.read_bytes()[:-30])
    refused("b.parquet: column 'extra' is not in .*a.parquet", table(3).append_column("extra", pa.array([1, 2, 3])))
    refused("b.parquet: no column 'row'", table(3).drop_columns(["row"]))
    refused("b.parquet: column 'row' is double, but int64", table(3).set_column(0, "row", pa.array([1.0, 2.0, 3.0])))
    refused("b.parquet: column 'row' is string.*categorify", table(1).set_column(0, "row", pa.array(["x"])))
    pq.write_table(table(0), tmp_path / "b.parquet")
    refused("b.parquet: no rows in 1 file", files=tmp_path / "b.parquet")
    pq.write_table(pa.table({"a": [1, None, 3]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet, row group 0: column 'a' has 1 null\(s\)"):
        list(ParquetLoader(tmp_path / "b.parquet", 2))


def test_a_file_that_changes_is_noticed(folder: Path) -> None:
    one = stream(ParquetLoader(write(folder, [20], 10), 4), 1)
    write(folder, [20], 7)
    with pytest.raises(ValueError, match=r"0.parquet, row group 0: has changed"):
        epoch(one)


@pytest.mark.long("larger tables")
def test_the_memory_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 3_000_000
    rng = np.random.default_rng(0)
    data = {"user": rng.integers(0, 10**6, rows), "item": rng.integers(0, 10**6, rows), "rating": rng.random(rows)}
    pq.write_table(pa.table(data), write(folder, [], 1) / "0.parquet", row_group_size=100_000)
    budget = 48 << 20
    one = ParquetLoader(folder, 4096, shuffle=True, memory_bytes=budget, seed=0)
    assert ParquetFiles(folder).size == 24 * rows > budget and not one.whole
    taken: list[int] = []
    original = ParquetFiles.read

    def read(*args: Any) -> Any:
        columns = original(*args)
        taken.append(sum(map(batching.bytes_of, columns.values())))
        return columns

    monkeypatch.setattr(ParquetFiles, "read", read)
    total = sum(int(batch["user"].sum()) for batch in one)
    assert total == data["user"].sum() and budget // 4 < max(taken) < budget
    with pytest.raises(
        ValueError, match=r"0.parquet: row group 0 has 100000 rows.*Use memory_bytes=(\d+) or more"
    ) as caught:
        ParquetLoader(folder, 4096, memory_bytes=8 << 20)
    enough = int(str(caught.value).split("memory_bytes=")[2].split()[0])
    assert len(next(iter(ParquetLoader(folder, 4096, memory_bytes=enough)))["user"]) == 4096


def test_a_loader_is_sent_without_what_it_can_read_again(folder: Path) -> None:
    one = ParquetLoader(write(folder, [500], 100), 50, shuffle=True, seed=5)
    first = epoch(one)
    assert one.table is not None
    data = pickle.dumps(one)
    assert len(data) < 3000
    other = pickle.loads(data)
    assert epoch(other) == epoch(one) != first


# --- prefetching ---


def test_an_exception_comes_at_its_place_and_the_thread_ends() -> None:
    def items() -> Any:
        yield 1
        raise ZeroDivisionError

    for depth in (0, 1, 5):
        seen = []
        with pytest.raises(ZeroDivisionError):
            for item in prefetch.ahead(items(), depth):
                seen.append(item)
        assert seen == [1]


def test_prefetching_is_bounded_and_stops() -> None:
    made: list[int] = []

    def items() -> Any:
        try:
            for i in range(1000):
                made.append(i)
                yield i
        finally:
            made.append(-1)

    ahead = prefetch.ahead(items(), 2)
    assert next(ahead) == 0
    ahead.close()
    assert made[-1] == -1 and len(made) <= 6


def test_arguments_that_make_no_sense() -> None:
    data = table(10)
    for options, message in (
        ({"rank": 0}, "belong together"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size, got 2 and 2"),
        ({"prefetch": -1}, "`prefetch` must be at least 0, got -1"),
        ({"remainder": "all"}, "'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            MemoryLoader(data, 2, **options)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="pin_memory=True needs a GPU"):
            MemoryLoader(data, 2, pin_memory=True)


@given(st.integers(1, 400_000) | st.just(order._FEW) | st.just(order._FEW - 1), st.integers(0, 2**63 - 1), st.data())
@settings(max_examples=20, deadline=None)
def test_an_order_is_the_same_wherever_it_is_drawn(rows: int, seed: int, data: st.DataObject) -> None:
    whole = order.drawn(rows, seed, 0, rows, CPU)
    assert whole.dtype == torch.int32 and torch.equal(whole.sort()[0], torch.arange(rows, dtype=torch.int32))
    start, stop = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
    assert torch.equal(order.drawn(rows, seed, start, stop, CPU), whole[start:stop])
    on_gpu = order.at(Permutation(rows, seed), torch.arange(start, stop))  # what a GPU computes
    assert on_gpu.tolist() == Permutation(rows, seed).at(start, stop - start).tolist()


def test_an_epochs_order_is_drawn_where_its_batches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", None)  # on the CPU, while a GPU would wait
    loader = MemoryLoader({"row": torch.arange(order._FEW)}, 1000, shuffle=True, seed=1, device="meta")
    monkeypatch.setattr(order, "at", lambda _, rows: rows)
    window = loader._everything(loader.table, loader.partition, 0, 0)
    assert window.order.device.type == "meta" and window.order.dtype == torch.int32


@pytest.mark.parametrize("keyed", [[], ["row", "genres"]])
def test_batches_for_a_gpu_are_gathered_in_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch, keyed: list[str]
) -> None:
    room: set[int] = set()

    def empty(*shape: int, pin_memory: bool = False, real: Any = torch.empty, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = real(*shape, **options)
        room.update([tensor.data_ptr()] if pin_memory else [])
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    loader = MemoryLoader(table(100), 10, shuffle=True, keyed=keyed)
    windows = loader._windows(loader.partition, 0, 0, 0)
    for block in loader._keyed_blocks(batching.blocks(windows, loader.partition, 0, 0, pinned=True), pinned=True):
        parts: list[torch.Tensor] = []
        block.map(lambda part, parts=parts: parts.append(part) or part)  # type: ignore[func-returns-value, misc]
        assert len(parts) == (9 if keyed else 7) and {part.data_ptr() for part in parts} <= room, "none copied again"
        assert [row for batch in block.batches() for row in check(dict(batch))]


def test_batches_are_where_the_ranks_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, fixed = (MemoryLoader(table(10), 5, **options) for options in ({}, {"device": "cpu"}))
    assert {loader.device, fixed.device} == {torch.device("cpu")}
    monkeypatch.setattr(adapter.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(adapter, "collective_device", lambda: torch.device("cuda", 1))
    assert (loader.device, fixed.device) == (torch.device("cuda", 1), torch.device("cpu"))


# -- files as people have them


def test_a_footer_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a row group, which takes time by the square of their number."""
    for number in range(2):
        pq.write_table(table(600, 600 * number), tmp_path / f"{number}.parquet", row_group_size=10)
    opened: list[Any] = []
    original = pq.ParquetFile

    def counting(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        opened.append(metadata)
        return original(*args, metadata=metadata, **kwargs)

    monkeypatch.setattr(pq, "ParquetFile", counting)
    monkeypatch.setattr(loaders, "BLOCK_BYTES", 1000)
    for memory in (1 << 29, 60_000):
        opened.clear()
        loader = ParquetLoader(tmp_path, 50, shuffle=True, memory_bytes=memory, prefetch=0)
        assert sorted(row for batch in loader for row in check(batch)) == list(range(1200))
        assert loader.whole == (memory > 60_000) and opened.count(None) == 2 and len(opened) > 100
        copy = pickle.loads(pickle.dumps(loader))
        assert sorted(row for batch in copy for row in check(batch)) == list(range(1200))
        assert opened.count(None) == 4


def test_footers_take_a_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footers, "_ROOM", 1)
    for number in range(3):
        pq.write_table(table(60, 60 * number), tmp_path / f"{number}.parquet", row_group_size=10)
    files = ParquetFiles(tmp_path)
    assert len(files._footers._local) == 1
    assert [row for batch in ParquetLoader(tmp_path, 60) for row in check(batch)] == list(range(180))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (pl.DataFrame({"u": [1] * 2000}), "column 'y' is gone"),
        (pl.DataFrame({"u": [1] * 2000, "y": [1] * 2000}), "column 'y' is int64, and was double"),
        (pl.DataFrame({"u": [1] * 30, "y": [1.0] * 30}), "it has 1 row groups|it has 30 rows, and had 100"),
    ],
)
def test_a_file_that_changes_in_mid_epoch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: pl.DataFrame, message: str
) -> None:
    monkeypatch.setattr(loaders, "BLOCK_BYTES", 1000)
    for number in range(4):
        rows = pl.DataFrame({"u": [number] * 2000, "y": [float(number)] * 2000})
        rows.write_parquet(tmp_path / f"{number}.parquet", row_group_size=100)
    batches = iter(ParquetLoader(tmp_path, 50, memory_bytes=60_000, prefetch=0))
    next(batches)
    for number in range(4):
        changed.write_parquet(tmp_path / f"{number}.parquet", row_group_size=100)
    with pytest.raises(ValueError, match=rf"\.parquet, row group \d+: has changed since .*({message})"):
        list(batches)


def test_short_and_large_lists_together(tmp_path: Path) -> None:
    pq.write_table(pa.table({"l": pa.array([[1], [2, 3]], pa.list_(pa.int64()))}), tmp_path / "0.parquet")
    pl.DataFrame({"l": [[4], []]}).write_parquet(tmp_path / "1.parquet")
    inner = pa.large_list(pa.field("x", pa.int64(), nullable=False))
    pq.write_table(pa.table({"l": pa.array([[5]], inner)}), tmp_path / "2.parquet")
    (batch,) = ParquetLoader(tmp_path, 5)
    assert batch["l"].values.tolist() == [1, 2, 3, 4, 5] and batch["l"].lengths.tolist() == [1, 2, 1, 0, 1]


def test_columns_with_dots_in_their_names(tmp_path: Path) -> None:
    rows = {"user": [1, 2], "user.id": [3, 4], "user.seen.list": [[5], [6, 7]], "user.name": ["a", "b"]}
    pl.DataFrame(rows).write_parquet(tmp_path / "0.parquet")
    files = ParquetFiles(tmp_path, ["user.id", "user.seen.list"])
    assert files.size == 2 * 8 + 2 * 3 * 8 + 2 * 16
    (batch,) = ParquetLoader(tmp_path, 2, columns=["user", "user.id", "user.seen.list"])
    assert batch["user"].tolist() == [1, 2] and batch["user.id"].tolist() == [3, 4]
    assert batch["user.seen.list"].values.tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match=r"'user.name' is .*, which has no tensor"):
        ParquetLoader(tmp_path, 2)


@pytest.mark.parametrize("kind", ["lists", "arrays", "pandas"])
def test_lists_of_lists_of_equal_lengths_are_dense(tmp_path: Path, kind: str) -> None:
    """Keys of many slots, as SparseOperationKit's demo makes them."""
    keys = np.arange(7 * 3 * 2).reshape(7, 3, 2)
    frame: Any = pl.DataFrame({"keys": keys.tolist() if kind == "lists" else pl.Series(keys), "row": np.arange(7)})
    frame.write_parquet(tmp_path / "0.parquet", row_group_size=3)
    if kind == "pandas":
        frame = pd.DataFrame({"keys": [[list(one) for one in row] for row in keys], "row": np.arange(7)})
        frame.to_parquet(tmp_path / "0.parquet", row_group_size=3)
    assert ParquetFiles(tmp_path).size == 7 * 7 * 8
    for loader in (ParquetLoader(tmp_path, 4, shuffle=True), MemoryLoader(frame, 4), MemoryLoader({"keys": keys}, 4)):
        for batch in loader:
            rows = batch.get("row", torch.arange(7)[len(batch["keys"]) % 4 and -3 :][: len(batch["keys"])])
            assert torch.equal(batch["keys"], torch.from_numpy(keys)[rows])


def test_arrays_in_descending_order() -> None:
    (batch,) = MemoryLoader({"x": np.arange(6).reshape(3, 2)[::-1, ::-1]}, 3)
    assert batch["x"].tolist() == [[5, 4], [3, 2], [1, 0]]


def test_lists_of_lists_of_other_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="column 'l' must have lists of lists of equal lengths, got 2 and 1: pad"):
        MemoryLoader(pl.DataFrame({"l": [[[1], [2]], [[3]]]}), 1)
    with pytest.raises(ValueError, match=r"column 'l' has lists with 1 null\(s\)"):
        MemoryLoader(pl.DataFrame({"l": [[[1], None]]}), 1)
    pl.DataFrame({"l": [[[1], [2]], [[3]]]}).write_parquet(tmp_path / "0.parquet", row_group_size=1)
    with pytest.raises(ValueError, match=r"row group 1: column 'l' must have lists of equal lengths .* \(1, 1\), and"):
        list(ParquetLoader(tmp_path, 2))
    (batch,) = MemoryLoader(pl.DataFrame({"l": [[[1], [2]]]}), 1)
    assert batch["l"].shape == (1, 2, 1)


def test_two_columns_of_one_name_and_batches_of_no_whole_number() -> None:
    with pytest.raises(ValueError, match=r"columns \['a'\] occur twice"):
        MemoryLoader(pd.DataFrame([[1, 2]], columns=["a", "a"]), 1)
    for wrong in (2.0, "2"):
        with pytest.raises(ValueError, match="`batch_size` must be an integer, got"):
            MemoryLoader({"a": [1, 2]}, wrong)

"""Rows in the form that people have them: frames of pandas, Arrow and polars, dicts, folders of partitions."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from nbdist.recsys.etl import (
    Categorify,
    DifferenceLag,
    FillMissing,
    HashedCross,
    Join,
    Workflow,
    leave_one_out,
    sequences,
    time_split,
    with_history,
    write_history,
)
from nbdist.recsys.io.storage import find, find_partitioned
from nbdist.recsys.loader import MemoryLoader, ParquetLoader, Ragged

ROWS: dict[str, Any] = {"user": [7, 7, 9], "movie": ["a", "b", "a"], "timestamp": [3, 1, 2], "age": [1.5, None, 2.5]}
FORMS = {
    "polars": pl.DataFrame(ROWS),
    "lazy": pl.LazyFrame(ROWS),
    "pandas": pd.DataFrame(ROWS),
    "table": pa.table(ROWS),
    "batch": pa.RecordBatch.from_pydict(ROWS),
    "dict": ROWS,
    "arrays": {**ROWS, "user": np.array(ROWS["user"]), "timestamp": torch.tensor(ROWS["timestamp"])},
}


def collected(frame: Any) -> list[Any]:
    rows: list[Any] = frame.lazy().collect().rows()
    return rows


@pytest.mark.parametrize("form", FORMS)
def test_every_door_takes_every_frame(tmp_path: Path, form: str) -> None:
    rows, usual = FORMS[form], FORMS["polars"]
    table = {"movie": ["a", "b"], "year": [1979, 1972]}
    steps = Join(pd.DataFrame(table), on="movie"), Categorify("user", "movie", "year"), FillMissing("age", value=0)
    workflow = Workflow(*steps).fit(rows, progress=False)
    expected = [(2, 2, 3, 1.5, 2), (2, 3, 1, 0.0, 3), (3, 2, 2, 2.5, 2)]
    assert collected(workflow.transform(rows)) == expected
    assert collected(Workflow(*steps).fit(usual, progress=False).transform(rows)) == expected
    files = workflow.write(rows, tmp_path / "out", shuffle=False, num_files=1, progress=False)
    assert pl.read_parquet(files).rows() == expected
    assert collected(sequences(rows, "movie")) == [(7, ["b", "a"]), (9, ["a"])]
    assert collected(with_history(rows, "movie"))[0][-1] == ["b"]
    files = write_history(rows, tmp_path / "histories", "movie", num_files=1, progress=False)
    assert pl.read_parquet(files)["history"].to_list() == [["b"], [], []]
    assert [len(collected(part)) for part in leave_one_out(rows)] == [3, 0, 0]
    assert [len(collected(part)) for part in time_split(rows, valid=2, test=3)] == [1, 1, 1]


@pytest.mark.parametrize("table", [FORMS["pandas"][["movie"]], FORMS["dict"], pa.table({"movie": ["a"]})])
def test_no_rows_are_no_files(table: Any) -> None:
    with pytest.raises(TypeError, match="files must be paths, URIs or glob patterns, got"):
        ParquetLoader(table, 4)


@pytest.mark.parametrize("rows", [3, [{"user": 1}], object()])
def test_an_object_without_rows_is_refused(rows: Any) -> None:
    with pytest.raises(TypeError, match="must be"):
        Workflow(Categorify("user")).fit(rows, progress=False)
    workflow = Workflow(Categorify("user")).fit(ROWS, progress=False)
    with pytest.raises(TypeError, match="the frame must be a frame of polars or pandas, an Arrow table, or a dict"):
        workflow.transform(rows)


def test_columns_that_polars_does_not_have() -> None:
    for rows in (pd.DataFrame({"user": [1, "a"]}), {"user": ["a", 1]}, {"user": "ann"}, {"user": [1], "movie": [1, 2]}):
        with pytest.raises(TypeError, match="the rows: polars cannot read this"):
            Workflow(Categorify("user")).fit(rows, progress=False)


def test_batches_of_lists_and_series() -> None:
    rows = {
        "a": [1, 2],
        "b": pl.Series([0.5, 1.5]),
        "c": pd.Series([True, False]),
        "l": [[1], [2, 3]],
        "d": pa.array([3, 4]),
    }
    (batch,) = MemoryLoader(rows, 2)
    assert [batch[name].tolist() for name in "abcd"] == [[1, 2], [0.5, 1.5], [True, False], [3, 4]]
    assert isinstance(batch["l"], Ragged) and batch["l"].values.tolist() == [1, 2, 3]
    (lazy,) = MemoryLoader(pl.LazyFrame({"a": [1, 2]}), 2)
    assert lazy["a"].tolist() == [1, 2]
    for column in (["a"], [[[1], [2, 3]]], [None]):
        with pytest.raises((TypeError, ValueError), match="'x'"):
            MemoryLoader({"x": column}, 1)


# -- Integers, and other types, that differ from fit


@pytest.mark.parametrize("given", [pl.Int8, pl.Int16, pl.Int64, pl.UInt8, pl.UInt32, pl.UInt64])
@pytest.mark.parametrize("fitted", [pl.Int16, pl.Int32, pl.UInt32, pl.UInt64])
@pytest.mark.parametrize("far", [0, 100])
def test_ids_of_another_integer_type(tmp_path: Path, given: Any, fitted: Any, far: int) -> None:
    """Codes by position, and by a join, where ids lie far from each other."""
    train = pl.DataFrame({"user": [1, 2, 2, 5 * far], "seen": [[1], [2, 2], [], [5 * far]]})
    types: Any = {"user": fitted, "seen": pl.List(fitted)}
    steps = (
        Join(pl.DataFrame({"user": [1, 2], "age": [30, 40]}), on="user"),
        HashedCross("user", "age", name="both", num_buckets=50),
        Categorify("user", num_buckets=3),
        Categorify("seen", "age"),
    )
    workflow = Workflow(*steps).fit(train.cast(types), progress=False)
    asked = pl.DataFrame({"user": [2, 1, 7], "seen": [[2, 7], None, [1]]})
    expected = workflow.transform(asked.cast(types)).collect()
    found = workflow.transform(asked.cast({"user": given, "seen": pl.List(given)})).collect()
    assert found.equals(expected) and found.schema == expected.schema
    files = workflow.write(
        asked.cast({"user": given, "seen": pl.List(given)}),
        tmp_path / "out",
        shuffle=False,
        num_files=1,
        progress=False,
    )
    assert pl.read_parquet(files).equals(expected)


def test_an_id_that_does_not_fit_is_not_known() -> None:
    train = pl.DataFrame(
        {"user": [1, 90, None], "seen": [[1], [90], None]}, schema={"user": pl.Int8, "seen": pl.List(pl.Int8)}
    )
    workflow = Workflow(Categorify("user", "seen")).fit(train, progress=False)
    asked = pl.DataFrame({"user": [2**40, 90, None], "seen": [[2**40, 90], None, []]})
    assert workflow.transform(asked).collect().rows() == [(1, [1, 3]), (3, [0]), (0, [])]
    raw = Workflow(FillMissing("user", value=0)).fit(train, progress=False)
    assert raw.transform(asked[1:]).collect()["user"].dtype == pl.Int8
    with pytest.raises(pl.exceptions.InvalidOperationError, match="user"):
        raw.transform(asked.select("user"), ["user"]).collect()


def test_floats_and_categories_of_other_types() -> None:
    train = pl.DataFrame({"x": [0.5], "s": ["a"]}, schema={"x": pl.Float32, "s": pl.String})
    workflow = Workflow(FillMissing("x", value=0), Categorify("s")).fit(train, progress=False)
    asked = pd.DataFrame({"x": [1, 2], "s": pd.Categorical(["a", "b"])})
    assert workflow.transform(asked).collect().rows() == [(1.0, 2), (2.0, 1)]
    assert workflow.transform({"x": [None], "s": [None]}).collect().rows() == [(0.0, 0)]
    with pytest.raises(ValueError, match="column 's' is int64, but it was string in fit"):
        workflow.transform({"x": [1.0], "s": [1]})


def test_a_vocabulary_grows_with_ids_of_another_integer_type() -> None:
    first = Workflow(Categorify("user")).fit(pl.DataFrame({"user": [1, 300]}, {"user": pl.Int32}), progress=False)
    grown = Workflow(Categorify("user")).fit({"user": [2**40, 300]}, previous=first, progress=False)
    assert grown.vocabularies["user"].mapping() == {1: 2, 300: 3, 2**40: 4}
    with pytest.raises(ValueError, match="some of them do not fit into Int8"):
        Workflow(Categorify("user")).fit(pl.DataFrame({"user": [1]}, {"user": pl.Int8}), previous=first, progress=False)


# -- Dates


def test_dates() -> None:
    day = datetime.date
    rows = pl.DataFrame({"u": [1, 1, 2], "d": [day(2024, 1, 1), day(2024, 1, 4), None]})
    rows = rows.with_columns(t=pl.col("d").cast(pl.Datetime("ms")) + pl.duration(milliseconds=500))
    workflow = Workflow(DifferenceLag("d", "t", by="u"), Categorify("d", "t")).fit(rows, progress=False)
    found = workflow.transform(rows).collect()
    assert found["d_difference_lag_1"].to_list() == [None, 3, None]
    assert found["t_difference_lag_1"].to_list() == [None, 3 * 86400.0, None]
    assert found["d"].to_list() == found["t"].to_list() == [2, 3, 0]
    assert workflow.transform(rows.cast({"t": pl.Datetime("ns")}), ["t"]).collect()["t"].to_list() == [2, 3, 0]


# -- Histories of users by two columns, and of lazy frames


def test_users_by_two_columns(tmp_path: Path) -> None:
    rows = pl.DataFrame(
        {"u": [1, 1, 2, 2, 1], "v": [1, 1, 1, 2, 2], "m": [10, 20, 30, 40, 50], "timestamp": [2, 1, 3, 4, 5]}
    )
    both = ["u", "v"]
    assert sequences(rows, "m", by=both).rows() == [(1, 1, [20, 10]), (2, 1, [30]), (2, 2, [40]), (1, 2, [50])]
    expected = [[20], [], [], [], []]
    assert with_history(rows, "m", by=both)["history"].to_list() == expected
    files = write_history(rows, tmp_path / "out", "m", by=both, num_files=1, progress=False)
    assert pl.read_parquet(files)["history"].to_list() == expected
    lazy = with_history(rows.lazy(), "m", by=both).filter(pl.col("m") == 10).select("history")
    assert isinstance(lazy, pl.LazyFrame) and lazy.collect()["history"].to_list() == [[20]]
    with pytest.raises(ValueError, match="no column 'w'"):
        sequences(rows, "m", by=["u", "w"])
    assert [len(part) for part in leave_one_out(pl.concat([rows] * 3), by=both)] == [7, 4, 4]


# -- Folders called after a column and its value


def partitioned(folder: Path) -> Path:
    rows = pl.DataFrame(
        {"user": [1, 2, 3, 4], "date": ["2024-01-01", "2024-01-01", "2024-01-02", None], "n": [1, 1, 2, 2]}
    )
    rows.write_parquet(pl.PartitionBy(folder, key=["date", "n"], include_key=False), mkdir=True)
    (folder / "_SUCCESS").touch()
    return folder


def test_partitions(tmp_path: Path) -> None:
    folder = partitioned(tmp_path / "rows")
    workflow = Workflow(Categorify("user", "date", "n")).fit(folder, progress=False)
    assert workflow.inputs == {"user": "int64", "date": "string", "n": "int64"} and workflow.rows == 4
    assert workflow.vocabularies["date"].mapping() == {"2024-01-01": 2, "2024-01-02": 3}
    files = workflow.write(folder, tmp_path / "out", shuffle=False, num_files=1, progress=False)
    assert sorted(pl.read_parquet(files)["date"].to_list()) == [0, 2, 2, 3]
    for pattern in ("*/*/*.parquet", "date=2024-01-0*/n=*", "date=*"):
        found = find_partitioned(str(folder / pattern))
        assert all(one.partition.keys() == {"date", "n"} for one in found), pattern
    (one,) = find_partitioned(folder / "date=2024-01-02")
    assert one.partition == {"n": "2"}
    loader = ParquetLoader(folder, 4, columns=["n", "user"])
    (batch,) = loader
    assert list(batch) == ["n", "user"] and batch["n"].tolist() == [(1 if u < 3 else 2) for u in batch["user"].tolist()]
    with pytest.raises(ValueError, match=r"column 'date' comes from the names of folders, .* columns="):
        ParquetLoader(folder, 4)
    by_day = Join(folder, on="user", columns="date")
    assert Workflow(by_day).fit({"user": [3]}, progress=False).transform({"user": [3]}).collect()["date"].to_list() == [
        "2024-01-02"
    ]


def test_partitions_of_a_loader_that_streams(tmp_path: Path) -> None:
    for day in range(4):
        (tmp_path / f"day={day}").mkdir()
        pl.DataFrame({"x": [day] * 3000}).write_parquet(tmp_path / f"day={day}" / "0.parquet", row_group_size=500)
    loader = ParquetLoader(tmp_path, 100, shuffle=True, memory_bytes=9 << 20, prefetch=0)
    rows = [(int(x), int(day)) for batch in loader for x, day in zip(batch["x"], batch["day"], strict=True)]
    assert len(rows) == 12_000 and all(x == day for x, day in rows)


def test_partitions_that_make_no_sense(tmp_path: Path) -> None:
    folder = partitioned(tmp_path / "rows")
    pl.DataFrame({"user": [1]}).write_parquet(folder / "0.parquet")
    with pytest.raises(ValueError, match=r"has both files \(0.parquet\) and partitions"):
        find(folder)
    (tmp_path / "other" / "year=1").mkdir(parents=True)
    (tmp_path / "other" / "month=1").mkdir()
    for name in ("year=1", "month=1"):
        pl.DataFrame({"user": [1]}).write_parquet(tmp_path / "other" / name / "0.parquet")
    with pytest.raises(ValueError, match="folders that name the same columns"):
        Workflow(Categorify("user")).fit(tmp_path / "other", progress=False)
    (tmp_path / "none" / "plain").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no \*.parquet"):
        find(tmp_path / "none")

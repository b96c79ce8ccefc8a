"""Parquet files looked at before they are read: their order, their one schema, their row groups, what is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nbdist.recsys.io.inspection import inspect
from nbdist.recsys.io.row_groups import RowGroup
from nbdist.recsys.io.storage import Found


def look(found: Found) -> tuple[str, dict[str, pa.DataType], pq.FileMetaData]:
    path = found.location
    assert isinstance(path, Path)
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        return path.name, dict(zip(schema.names, schema.types, strict=True)), file.metadata


def test_files_with_one_schema(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(5), "b": range(5)}), tmp_path / "1.parquet", row_group_size=3)
    pq.write_table(pa.table({"a": [1], "b": [2]})[:0], tmp_path / "2.parquet")
    pq.write_table(pa.table({"b": [1], "a": [2]}), tmp_path / "3.parquet")
    found = inspect(tmp_path, look, lambda group, types, opened: 10 * group.num_rows + len(types))
    assert found.opened == [path.name for path in found.paths] == ["1.parquet", "2.parquet", "3.parquet"]
    assert list(found.types) == ["a", "b"]
    assert found.groups == [RowGroup(0, 0, 3, 32), RowGroup(0, 1, 2, 22), RowGroup(2, 0, 1, 12)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"a": [1]}), "2.parquet: no column 'b', which is in .*1.parquet"),
        (pa.table({"a": [1], "b": [0.5]}), "2.parquet: column 'b' is double, but int64 in .*1.parquet"),
        (pa.table({"a": [1], "b": [2], "c": [3]}), "2.parquet: column 'c' is not in .*1.parquet; leave it out"),
    ],
)
def test_files_that_differ(tmp_path: Path, table: pa.Table, message: str) -> None:
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "1.parquet")
    pq.write_table(table, tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=message):
        inspect(tmp_path, look, hint="; leave it out")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name at least one file"):
        inspect([], look)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        inspect(tmp_path / "nowhere", look)
    pq.write_table(pa.table({"a": [1]})[:0], tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=r"1.parquet: no rows in 1 file\(s\)"):
        inspect(tmp_path, look)
    (tmp_path / "1.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"1.parquet: not a whole Parquet file"):
        inspect(tmp_path, look)

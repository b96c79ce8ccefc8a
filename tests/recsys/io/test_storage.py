"""Parquet files behind URIs: found, read by share, on an object store of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from nbdist import RayOptions, Session
from nbdist.recsys.etl import Categorify, Compute, Join, Workflow
from nbdist.recsys.io import storage
from nbdist.recsys.loader import ParquetLoader

ROWS = 480_000


@pytest.fixture(scope="module")
def query() -> Iterator[str]:
    """Start an S3 server in this process and return how to reach it; it has an empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        endpoint = f"{host}:{port}"
        pafs.S3FileSystem(allow_bucket_creation=True, endpoint_override=endpoint, scheme="http").create_dir("ratings")
        yield f"endpoint_override={endpoint}&scheme=http"
    server.stop()


@pytest.fixture(scope="module")
def files(query: str) -> str:
    """Three files of eight row groups each, rows numbered through."""
    filesystem, root = storage.resolve(f"s3://ratings/train?{query}")
    for number in range(3):
        rows = pa.array(range(number * ROWS // 3, (number + 1) * ROWS // 3))
        table = pa.table({"row": rows, "rating": rows.cast(pa.float64())})
        pq.write_table(table, f"{root}/part-{number}.parquet", row_group_size=ROWS // 24, filesystem=filesystem)
    return f"s3://ratings/train?{query}"


def test_find_lists_the_files_of_a_pattern(files: str, query: str) -> None:
    train = "s3://ratings/train"
    names = [f"{train}/part-{number}.parquet?{query}" for number in range(3)]
    for same in (files, f"{train}/?{query}", f"{train}/*.parquet?{query}"):
        assert storage.find(same) == names
    assert storage.find(names[1]) == [names[1]]
    assert storage.find(f"{train}/*-[02].parquet?{query}") == [names[0], names[2]]
    for nothing in (f"{train}/no_such?{query}", f"{train}/*.csv?{query}"):
        with pytest.raises(FileNotFoundError, match="no such file"):
            storage.find(nothing)
    with pytest.raises(ValueError, match="last part"):
        storage.find(f"s3://ratings/*/part-0.parquet?{query}")
    with pytest.raises(ValueError, match=r"neither Arrow .* nor fsspec"):
        storage.find("nowhere://x/y.parquet")


def test_file_uris_and_unknown_schemes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    (found,) = storage.find(f"file://{tmp_path}")
    with storage.parquet(found) as opened:
        assert opened.metadata.num_rows == 2
    import fsspec

    with fsspec.open("memory://somewhere/b.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [3]}), file)
    assert storage.find("memory://somewhere") == ["memory://somewhere/b.parquet"]
    with storage.parquet("memory://somewhere/b.parquet") as opened:
        assert opened.read().column("x").to_pylist() == [3]


def reads(files: str) -> tuple[list[int], list[int]]:
    """The rows of a rank's epoch, and the first rows of the row groups that it has fetched for them."""
    fetched = []
    original = pq.ParquetFile.read_row_group

    def counting(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        fetched.append(self.metadata.row_group(number).column(0).statistics.min)
        return original(self, number, *args, **kwargs)

    pq.ParquetFile.read_row_group = counting
    try:
        # Less memory than the rows take: else every rank reads all of them once, to shuffle them as a whole.
        loader = ParquetLoader(files, 4096, shuffle=True, seed=1, prefetch=0, memory_bytes=14 << 20)
        rows = [row for batch in loader for row in batch["row"].tolist()]
    finally:
        pq.ParquetFile.read_row_group = original
    return rows, fetched


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.long("clusters of Ray"))])
def test_each_rank_reads_its_share(files: str, engine: str, request: pytest.FixtureRequest) -> None:
    chosen: Any = engine
    if engine == "ray":
        chosen = RayOptions(address=request.getfixturevalue("ray_cluster").address, placement="spread")
    with Session(2, engine=chosen) as own:
        nodes = own.run_all(lambda: (dist.get_rank(), os.environ["NODE_RANK"]))
        (rows_0, fetched_0), (rows_1, fetched_1) = own.run_all(reads, files)
    assert nodes == [(0, "0"), (1, "0" if engine == "local" else "1")]
    assert sorted(rows_0 + rows_1) == list(range(ROWS)) and len(rows_0) == len(rows_1)
    assert rows_0 != sorted(rows_0)
    # Where the shares meet, in two places, a row group may belong to both.
    assert len(set(fetched_0) | set(fetched_1)) == 24 and len(set(fetched_0) & set(fetched_1)) <= 2
    assert max(map(len, (fetched_0, fetched_1))) <= 14


def coded(source: str, movies: str, folder: str) -> tuple[int, ...]:
    """The whole of a workflow; the row groups that this rank has fetched of the ratings."""
    fetched: set[int] = set()
    original = pq.ParquetFile.read_row_groups

    def counting(self: Any, numbers: Any, *args: Any, **kwargs: Any) -> Any:
        if "row" in self.schema_arrow.names:
            fetched.update(self.metadata.row_group(number).column(0).statistics.min for number in numbers)
        return original(self, numbers, *args, **kwargs)

    pq.ParquetFile.read_row_groups = counting
    try:
        workflow = Workflow(Join(movies, on="rating"), Categorify("kind"), Compute(good=pl.col("rating") > 3))
        workflow.fit(source, progress=False).write(source, folder, num_files=2, progress=False)
    finally:
        pq.ParquetFile.read_row_groups = original
    return tuple(sorted(fetched))


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.long("clusters of Ray"))])
def test_etl_of_an_object_store(
    files: str, query: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    filesystem, root = storage.resolve(f"s3://ratings/movies?{query}")
    kinds = pa.table({"rating": [float(i) for i in range(ROWS)], "kind": [f"kind {i % 7}" for i in range(ROWS)]})
    pq.write_table(kinds, f"{root}/movies.parquet", filesystem=filesystem)
    movies = f"s3://ratings/movies/movies.parquet?{query}"
    chosen: Any = engine
    if engine == "ray":
        chosen = RayOptions(address=request.getfixturevalue("ray_cluster").address, placement="spread")
    with Session(2, engine=chosen) as own:
        first, second = own.run_all(coded, files, movies, str(tmp_path / "two"))
        # Each rank reads its half to learn from it and to write it; the first row group, for the types, both do.
        assert len(first) + len(second) <= 24 + 2 and len(set(first) | set(second)) == 24
        with pytest.raises(ValueError, match="cannot rename a folder"):
            own.run(coded, files, movies, f"s3://ratings/out?{query}")
    assert len(coded(files, movies, str(tmp_path / "one"))) == 24
    for name in ("part-00000.parquet", "part-00001.parquet"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    found = pl.read_parquet(tmp_path / "one").sort("row")
    assert found["row"].to_list() == list(range(ROWS)) and found["good"].sum() == ROWS - 4
    assert found["kind"].n_unique() == 7 and found["kind"].min() == 2

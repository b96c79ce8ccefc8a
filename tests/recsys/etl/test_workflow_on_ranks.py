"""ETL on real ranks: the same vocabularies and the same bytes for any number of them; failures leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch.distributed as dist
from cells import cells
from conftest import Kernel, Sessions, poll

from nbdist import RankDied, in_ddp
from nbdist.recsys.etl import (
    Categorify,
    Compute,
    DifferenceLag,
    Drop,
    FillMissing,
    Filter,
    Join,
    JoinGroupby,
    Normalize,
    TargetEncoding,
    Workflow,
    inputs,
    with_history,
    write_history,
)
from nbdist.recsys.loader import ParquetLoader

pytestmark = pytest.mark.slow

CELLS = cells("recsys/etl/cells/workflow_on_ranks.py")


def movies() -> pl.DataFrame:
    genres = [None if i % 11 == 0 else [f"g{j}" for j in range(i % 4)] for i in range(80)]
    return pl.DataFrame({"movie": range(80), "genres": genres})


def ratings(rows: int, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "row": range(rows),
            "user": [None if u == 3 else f"user {u}" for u in rng.geometric(0.05, rows)],
            "movie": rng.integers(0, 100, rows),
            "rating": rng.integers(1, 11, rows) / 2,
        }
    )


def workflow() -> Workflow:
    return Workflow(
        Join(movies(), on="movie"),
        Categorify("user", "movie", "genres", min_count={"user": 2}, max_size={"movie": 70}),
        Compute(label=pl.col("rating") > 3),
        Drop("rating"),
    )


@pytest.mark.long("rows larger than memory")
def test_a_lazy_frame_where_machines_share_no_disk(sessions: Sessions) -> None:
    """Ranks 1 and 2 behave as if they were on another machine, without the temporary files of rank 0's."""
    frame = ratings(10_000)

    def rows() -> tuple[str, pl.DataFrame, bool]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inputs, "_CHUNK", 10_000)
            if dist.get_rank():
                exists = os.path.exists
                patch.setenv("NODE_RANK", "1")
                patch.setattr(os.path, "exists", lambda path: "frame.parquet" not in str(path) and exists(path))
            with inputs.opened(frame.lazy().filter(pl.col("rating") > 1)) as given:
                mine = pl.concat(part.read(given.schema.names(), "streaming") for part in given.share(1000))
                where = given.where
        dist.barrier()
        return where, mine, os.path.exists(where)

    answers = sessions[3].run_all(rows)
    places = [where for where, *_ in answers]
    assert places[0] != places[1] == places[2], "a copy for a machine"
    assert pl.concat(mine for _, mine, _ in answers).equals(frame.filter(pl.col("rating") > 1))
    assert not any(left for *_, left in answers)


@pytest.mark.parametrize(
    ("rows", "files", "group", "shuffle"),
    [(2500, 4, 300, True), (2500, 7, 2500, False), (7, 3, 2, True), (1, 4, 1, True)],
)
def test_any_number_of_ranks_gives_the_same(
    sessions: Sessions, tmp_path: Path, rows: int, files: int, group: int, shuffle: bool
) -> None:
    frame = ratings(rows)
    inputs = tmp_path / "in"
    inputs.mkdir()
    for number, start in enumerate(range(0, rows, 2000)):
        frame[start : start + 2000].write_parquet(inputs / f"{number}.parquet", row_group_size=group)

    def run(folder: Path, memory_bytes: int = 50_000) -> tuple[dict[str, dict[Any, int]], list[Path]]:
        one = workflow().fit(inputs, memory_bytes=memory_bytes)
        one.save(folder / "workflow")
        options: dict[str, Any] = {
            "num_files": files,
            "shuffle": shuffle,
            "row_group_size": 200,
            "memory_bytes": memory_bytes,
        }
        paths = one.write(inputs, folder / "out", seed=3, **options)
        return {name: vocabulary.mapping() for name, vocabulary in one.vocabularies.items()}, paths

    (tmp_path / "1").mkdir()
    codes, paths = run(tmp_path / "1")
    expected = Workflow.load(tmp_path / "1" / "workflow").transform(frame).collect()
    found = pl.concat(map(pl.read_parquet, paths))
    assert found.sort("row").equals(expected) and (found.equals(expected) or shuffle)
    assert len(paths) == min(files, rows)
    (tmp_path / "whole").mkdir()
    in_memory = run(tmp_path / "whole", memory_bytes=1 << 30)[1]
    assert [path.read_bytes() for path in in_memory] == [path.read_bytes() for path in paths]
    for world in (2, 3):
        (tmp_path / str(world)).mkdir()
        for theirs, their_paths in sessions[world].run_all(run, tmp_path / str(world)):
            assert theirs == codes
            assert [path.name for path in their_paths] == [path.name for path in paths]
            assert [path.read_bytes() for path in their_paths] == [path.read_bytes() for path in paths]
        assert sorted(os.listdir(tmp_path / str(world))) == ["out", "workflow"]
        for path in (tmp_path / "1" / "workflow").iterdir():
            assert path.read_bytes() == (tmp_path / str(world) / "workflow" / path.name).read_bytes()


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.long("more numbers of ranks"))])
def test_fitted_statistics_do_not_depend_on_the_ranks(sessions: Sessions, tmp_path: Path, world: int) -> None:
    rng = np.random.default_rng(5)
    rows = 600
    frame = ratings(rows).with_columns(
        price=pl.Series(np.where(rng.random(rows) < 0.1, np.nan, rng.lognormal(3, 4, rows))), label=rng.random(rows)
    )
    folder = tmp_path / "in"
    folder.mkdir()
    for number, (start, stop) in enumerate([(0, 1), (1, 1), (1, 320), (320, rows)]):
        frame[start:stop].write_parquet(folder / f"{number}.parquet", row_group_size=160)

    def run(path: Path, memory_bytes: int = 50_000) -> list[bytes]:
        one = Workflow(
            DifferenceLag("row", "price", by="movie", shift=[1, -3]),
            Filter(pl.col("rating") > 1),
            JoinGroupby("user", ("user", "movie"), columns="price", stats=["count", "mean", "std", "max"]),
            TargetEncoding("movie", ("user", "movie"), target="label", folds=3),
            FillMissing("price", value=0),
            Normalize("price", "user_price_mean", "TE_movie_label"),
        ).fit(folder, memory_bytes=memory_bytes)
        one.save(path / "workflow")
        options: dict[str, Any] = {
            "row_group_size": 80,
            "memory_bytes": memory_bytes,
            "num_files": 3,
            "training": True,
        }
        files = one.write(folder, path / "out", seed=3, **options)
        files += one.write(folder, path / "plain", shuffle=False, **options)
        few = Workflow(*one.steps[2:4]).fit(frame[:2], progress=False)  # some ranks have no rows
        files += few.write(frame[:2], path / "few", training=True, progress=False)
        return [file.read_bytes() for file in [*files, *sorted((path / "workflow").iterdir())]]

    expected = {}
    for name, memory in (("1", 50_000), ("whole", 1 << 30)):
        (tmp_path / name).mkdir()
        expected[name] = run(tmp_path / name, memory)
    assert expected["1"] == expected["whole"]
    (tmp_path / "ranks").mkdir()
    assert all(theirs == expected["1"] for theirs in sessions[world].run_all(run, tmp_path / "ranks"))


def test_frames_in_ranks(sessions: Sessions, tmp_path: Path) -> None:
    frame = ratings(1000)
    one = workflow().fit(frame.lazy().filter(pl.col("row") % 2 == 0), progress=False)

    def run() -> tuple[list[Path], Workflow]:
        lazy = frame.lazy().filter(pl.col("row") % 2 == 0)
        other = workflow().fit(lazy)
        return other.write(lazy, tmp_path / "out", num_files=2), other

    paths, other = sessions[2].run(run)
    assert other.rows == 500 and other.describe() == one.describe()
    assert other.transform(frame).collect().equals(one.transform(frame).collect())
    expected = one.transform(frame.filter(pl.col("row") % 2 == 0)).collect()
    assert pl.concat(map(pl.read_parquet, paths)).sort("row").equals(expected)

    def load() -> list[int]:
        loader = ParquetLoader(tmp_path / "out", 50, columns=["row", "user", "genres"])
        return [row for batch in loader for row in batch["row"].tolist()]

    assert sorted(row for rank in sessions[2].run_all(load) for row in rank) == list(range(0, 1000, 2))


def test_ranks_that_fit_different_rows_are_refused(sessions: Sessions, tmp_path: Path) -> None:
    frame = ratings(100)

    def other_rows() -> None:
        import torch.distributed as dist

        workflow().fit(frame.head(50 + dist.get_rank()))

    with pytest.raises(ValueError, match="ranks do not agree about fit: rows is 50 on rank 0 and 51 on rank 1"):
        sessions[2].run(other_rows)

    one = workflow().fit(frame, progress=False)

    def other_seed() -> None:
        import torch.distributed as dist

        one.write(frame, tmp_path / "out", seed=dist.get_rank())

    with pytest.raises(ValueError, match="agree about write: seed is 0 on rank 0 and 1 on rank 1"):
        sessions[2].run(other_seed)

    def there_already() -> list[str]:
        import torch.distributed as dist

        try:
            one.write(frame, tmp_path)
        except FileExistsError as error:
            said = [str(error)]
        dist.barrier()
        return said

    (tmp_path / "mine").write_text("")
    for (said,) in sessions[2].run_all(there_already):
        assert "already exists" in said
    assert os.listdir(tmp_path) == ["mine"]


# --- what is killed or interrupted in mid-write ---


def nothing_to_take(folder: Path) -> None:
    """Nothing that a loader would read is there, or anywhere else that a pattern finds."""
    assert not folder.exists()
    for files in (folder, folder.parent, folder.parent / "*.parquet", folder.parent / "*" / "*.parquet"):
        with pytest.raises(FileNotFoundError):
            ParquetLoader(files, 10)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_in_mid_write(tmp_path: Path, rank: int) -> None:
    frame = ratings(8000)
    one = workflow().fit(frame, progress=False)
    out = tmp_path / "data" / "out"
    options: dict[str, Any] = {
        "columns": ["row", "user", "label"],
        "num_files": 6,
        "row_group_size": 100,
        "memory_bytes": 1 << 17,
    }

    def run() -> None:
        import torch.distributed as dist

        from nbdist.recsys.etl import output

        original, calls = output.Spill.read, []

        def read(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 10 and dist.get_rank() == rank:  # in its second file
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)  # type: ignore[arg-type]

        output.Spill.read = read  # type: ignore[method-assign]
        one.write(frame, out, **options)

    with pytest.raises(RankDied, match=f"rank {rank} .*SIGKILL"):
        in_ddp(2, run)
    nothing_to_take(out)
    assert len(one.write(frame, out, progress=False, **options)) == 6
    assert os.listdir(tmp_path / "data") == ["out"], "what the killed one left has been taken away"
    assert sum(len(batch["row"]) for batch in ParquetLoader(out, 1000)) == 8000


SCRIPT = CELLS["script"]


@pytest.mark.long("ranks and kernels stopped in an ETL")
@pytest.mark.parametrize("stage", ["shuffled-0-0.arrow", "whole/part-00003.parquet"])
def test_a_process_is_killed(tmp_path: Path, stage: str) -> None:
    out = tmp_path / "data" / "out"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        assert poll((tmp_path / "data" / ".out.partial" / stage).exists)
    finally:
        process.kill()
        process.wait()
    nothing_to_take(out)
    frame = pl.DataFrame({"user": [1]})
    Workflow().fit(frame, progress=False).write(frame, out, progress=False)
    assert os.listdir(tmp_path / "data") == ["out"]


@pytest.mark.long("ranks and kernels stopped in an ETL")
def test_the_kernel_is_interrupted(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok("from nbdist import in_ddp\nimport sys\nsys.argv = ['-', 'out']")
    for cell in (SCRIPT, f"def run():\n    exec({SCRIPT!r}, {{}})\nin_ddp(2, run)"):
        running = kernel.start(cell)
        scratch = kernel.cwd / ".out.partial"
        assert poll((scratch / "whole" / "part-00003.parquet").exists)
        kernel.interrupt()
        assert kernel.finish(running).error == "KeyboardInterrupt"
        assert not scratch.exists() and not (kernel.cwd / "out").exists()


def test_histories_do_not_depend_on_the_ranks(sessions: Sessions, tmp_path: Path) -> None:
    frame = ratings(1500).with_columns(timestamp=pl.col("rating") * 10)

    def run(folder: Path, memory_bytes: int = 20_000) -> list[bytes]:
        files = write_history(
            frame, folder / "out", "movie", num_files=4, row_group_size=100, memory_bytes=memory_bytes
        )
        return [file.read_bytes() for file in files]

    for name in ("1", "whole", "2", "3"):
        (tmp_path / name).mkdir()
    expected = run(tmp_path / "1")
    assert run(tmp_path / "whole", 1 << 30) == expected
    read = pl.concat(pl.read_parquet(file) for file in sorted((tmp_path / "1" / "out").iterdir()))
    assert read.equals(with_history(frame, "movie"))
    for world in (2, 3):
        for theirs in sessions[world].run_all(run, tmp_path / str(world)):
            assert theirs == expected
        assert os.listdir(tmp_path / str(world)) == ["out"]


# --- larger than memory ---


@pytest.mark.long("rows larger than memory")
@pytest.mark.parametrize("what", ["workflow", "histories"])
def test_rows_larger_than_memory(tmp_path: Path, what: str) -> None:
    rng = np.random.default_rng(0)
    large, further, made = {"workflow": (3_000_000, 4, 8 * 3.5), "histories": (1_500_000, 1, 8 * 40)}[what]
    for name, rows in (("small", 50_000), ("large", large)):
        (tmp_path / "in" / name).mkdir(parents=True)
        user, item = rng.integers(0, 1000, rows), rng.integers(0, 1000, rows)
        part = pl.DataFrame({"user": user, "item": item, **{f"f{i}": rng.random(rows) for i in range(further)}})
        part.write_parquet(tmp_path / "in" / name / "rows.parquet", row_group_size=50_000, compression="lz4")
    command = [sys.executable, "-c", CELLS["larger than memory"], str(tmp_path / "in"), str(tmp_path), what]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    grown = int(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    size = rows * (8 * (2 + further) + made)
    assert grown < size / 3, f"memory grew by {grown / 1e6:.0f} MB for rows of {size / 1e6:.0f} MB"
    assert pl.scan_parquet(tmp_path / "large" / "*.parquet").select(pl.len()).collect().item() == rows

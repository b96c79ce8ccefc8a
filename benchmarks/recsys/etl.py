"""Speed and memory of `nbdist.recsys.etl` as it makes training files of ratings, compared with pandas,
polars, DuckDB and Dask.

The work: ratings are joined with the movies' genres; users, movies and the lists of genres become codes by descending
frequency; a label says whether the rating is above 3; all is shuffled and written to Parquet, in 8 files.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from benchmarks import machine, plots
from nbdist import Session
from nbdist.recsys.etl import Categorify, Compute, Drop, Join, Workflow

USERS, MOVIES = 162_541, 59_047  # as many as MovieLens 25M has
GENRES = 20
FILES = 8
REQUIRED = {"pandas": 3.0, "peers": 1.3, "share": 0.5, "peak": 4e9, "ranks": 1.5}


def generate(folder: Path, rows: int) -> None:
    """Ratings of a long tail of users and movies, in 5 files of row groups of 2^17 rows; movies with 0 to 6 genres."""
    rng = np.random.default_rng(0)
    names = np.array([f"genre {i}" for i in range(GENRES)])
    many = rng.choice(7, MOVIES, p=[0.08, 0.35, 0.28, 0.17, 0.08, 0.03, 0.01])
    genres = [names[rng.choice(GENRES, n, replace=False)].tolist() for n in many]
    movies = pl.DataFrame({"movie": pl.Series(range(1, MOVIES + 1), dtype=pl.Int32), "genres": genres})
    movies.write_parquet(folder / "movies.parquet")
    (folder / "ratings").mkdir()
    for number in range(5):
        n = rows // 5
        user, movie = (
            (top * rng.random(n) ** power).astype(np.int32) + 1 for top, power in ((USERS, 1.7), (MOVIES, 3.0))
        )
        part = {"user": user, "movie": movie, "rating": rng.integers(1, 11, n).astype(np.float32) / 2}
        part["timestamp"] = rng.integers(789_652_009, 1_574_327_703, n)
        pl.DataFrame(part).write_parquet(folder / "ratings" / f"{number}.parquet", row_group_size=1 << 17)


def fitted(folder: Path, lists: bool = True) -> Workflow:
    workflow = Workflow(
        *([Join(folder / "movies.parquet", on="movie", columns="genres")] if lists else []),
        Categorify("user", "movie", *(["genres"] if lists else [])),
        Compute(label=pl.col("rating") > 3),
        Drop("rating", "timestamp"),
    )
    workflow.fit(folder / "ratings", progress=False)
    return workflow


def ours(folder: Path, out: Path, lists: bool = True, **options: Any) -> None:
    fitted(folder, lists).write(folder / "ratings", out, num_files=FILES, progress=False, **options)


#: What the profile leaves out of `ours`, each by itself.
WITHOUT: dict[str, Callable[[Path, Path], object]] = {
    "what `write` does": lambda folder, out: fitted(folder),
    "the shuffle": partial(ours, shuffle=False),
    "compression": partial(ours, compression="none"),
    "the lists of genres": partial(ours, lists=False),
}


def with_pandas(folder: Path, out: Path) -> None:
    """The same, as one who knows pandas writes it: no Python loop over ratings; genres are coded once per movie."""
    import pandas as pd

    def codes(counts: pd.Series) -> pd.Series:
        ordered = (
            counts.rename("n").rename_axis("value").reset_index().sort_values(["n", "value"], ascending=[False, True])
        )
        return pd.Series(np.arange(2, 2 + len(ordered)), index=ordered["value"])

    ratings = pd.read_parquet(folder / "ratings", columns=["user", "movie", "rating"])
    movies = pd.read_parquet(folder / "movies.parquet")
    seen = ratings["movie"].value_counts()
    each = movies.explode("genres").dropna()
    genre = codes(each["movie"].map(seen).groupby(each["genres"]).sum()).to_dict()
    movies["genres"] = [[genre[name] for name in names] for names in movies["genres"]]
    frame = ratings.merge(movies, on="movie", how="left")
    frame["user"] = frame["user"].map(codes(frame["user"].value_counts()))
    frame["movie"] = frame["movie"].map(codes(seen))
    frame["label"] = frame["rating"] > 3
    frame = frame[["user", "movie", "genres", "label"]].sample(frac=1, random_state=0)
    out.mkdir()
    for number in range(FILES):
        start, stop = (len(frame) * i // FILES for i in (number, number + 1))
        part = frame.iloc[start:stop]
        part.to_parquet(out / f"{number}.parquet", index=False, compression="zstd", row_group_size=1 << 17)


def with_polars(folder: Path, out: Path) -> None:
    """The same, as one who knows polars writes it: counts in one scan, small tables of codes, rows joined lazily."""
    ratings = pl.scan_parquet(folder / "ratings" / "*.parquet")
    movies = pl.scan_parquet(folder / "movies.parquet")
    seen, users = pl.collect_all([ratings.group_by(name).len() for name in ("movie", "user")], engine="streaming")

    def codes(counts: pl.DataFrame, name: str) -> pl.LazyFrame:
        ordered = counts.lazy().sort(["len", name], descending=[True, False]).select(pl.col(name))
        return ordered.with_row_index("code", offset=2).with_columns(pl.col("code").cast(pl.Int32))

    lists = movies.join(seen.lazy(), on="movie", how="left").explode("genres").drop_nulls("genres")
    genres = codes(lists.group_by("genres").agg(pl.col("len").sum()).collect(), "genres").collect()
    coded = movies.with_columns(
        pl.col("genres").list.eval(pl.element().replace_strict(genres["genres"], genres["code"]))
    )
    frame = (
        ratings.join(codes(users, "user"), on="user")
        .join(codes(seen, "movie").join(coded, on="movie", how="left"), on="movie", suffix="_movie")
        .select(user="code", movie="code_movie", genres="genres", label=pl.col("rating") > 3)
        .collect(engine="streaming")
        .sample(fraction=1, shuffle=True, seed=0)
    )
    out.mkdir()
    for number in range(FILES):
        start, stop = (len(frame) * i // FILES for i in (number, number + 1))
        frame[start:stop].write_parquet(out / f"{number}.parquet", compression="zstd", row_group_size=1 << 17)


def with_duckdb(folder: Path, out: Path) -> None:
    """The same in SQL; DuckDB makes as many files as it has threads."""
    import duckdb

    codes = "select {0}, (row_number() over (order by n desc, {0}) + 1)::int as code from {0}_counts"
    query = f"""
        set preserve_insertion_order = false;
        create view ratings as from read_parquet('{folder}/ratings/*.parquet');
        create view movies as from read_parquet('{folder}/movies.parquet');
        create temp table user_counts as select user, count(*) as n from ratings group by user;
        create temp table movie_counts as select movie, count(*) as n from ratings group by movie;
        create temp table genre_counts as select genre, sum(n) as n
            from (select movie, unnest(genres) as genre from movies) join movie_counts using (movie) group by genre;
        create temp table users as {codes.format("user")};
        create temp table genre_codes as {codes.format("genre")};
        create temp table coded as select movie, list(g.code) as genres
            from (select movie, unnest(genres) as genre from movies) join genre_codes g using (genre) group by movie;
        create temp table items as select m.movie, m.code, coalesce(c.genres, []) as genres
            from ({codes.format("movie")}) m left join coded c using (movie);
        copy (
            select u.code as user, i.code as movie, i.genres, r.rating > 3 as label
            from ratings r join users u using (user) join items i using (movie) order by random()
        ) to '{out}' (format parquet, compression zstd, row_group_size {1 << 17}, per_thread_output);
    """
    with duckdb.connect() as connection:
        connection.execute(query)


def with_dask(folder: Path, out: Path) -> None:
    """The same as one who knows Dask writes it: what is once a user or a movie by pandas, all else by partitions.

    Each file has a part of every file's rows, in an order of its own: Dask has no shuffle of all rows.
    """
    import dask.dataframe as dd
    import pandas as pd

    def codes(counts: pd.Series) -> pd.Series:
        values = counts.index.to_numpy()[np.lexsort((counts.index, -counts.to_numpy()))]
        return pd.Series(np.arange(2, 2 + len(values), dtype=np.int32), index=values)

    ratings = dd.read_parquet(folder / "ratings" / "*.parquet", columns=["user", "movie", "rating"], split_row_groups=8)
    users, seen = dd.compute(ratings["user"].value_counts(), ratings["movie"].value_counts())
    movies = pd.read_parquet(folder / "movies.parquet").set_index("movie")
    each = movies.explode("genres").dropna()
    genre = codes(each.index.to_series().map(seen).groupby(each["genres"]).sum()).to_dict()
    user, movie = codes(users), codes(seen)
    lists = pa.array(
        [[genre[name] for name in movies["genres"].get(key, ())] for key in movie.index], pa.list_(pa.int32())
    )

    def coded(part: pd.DataFrame) -> pd.DataFrame:
        file = np.random.default_rng(int(part["user"].sum())).integers(0, FILES, len(part))
        made = {"user": part["user"].map(user), "movie": part["movie"].map(movie), "label": part["rating"] > 3}
        return pd.DataFrame({**made, "file": file})

    def mixed(part: pd.DataFrame) -> pd.DataFrame:
        part = part.drop(columns="file").sample(frac=1, random_state=0)
        found = pd.arrays.ArrowExtensionArray(lists.take(pa.array(part["movie"].to_numpy() - 2)))
        return part.assign(genres=found)

    types = {"user": "int32", "movie": "int32", "label": "bool"}
    genres = {"genres": pd.ArrowDtype(lists.type)}
    shuffled = ratings.map_partitions(coded, meta={**types, "file": "int64"}).shuffle("file", npartitions=FILES)
    written = shuffled.map_partitions(mixed, meta={**types, **genres})
    written.to_parquet(out, compression="zstd", write_index=False, row_group_size=1 << 17)


class Run(NamedTuple):
    """The cost of a task, in a process of its own; or the slowest of the ranks, and the memory of all together."""

    seconds: float
    cpu: float
    """Seconds of all cores together."""
    peak: int
    """The most memory that the process has had in its life, in bytes."""


def measured(task: Callable[[Path, Path], object], folder: Path, out: Path) -> Run:
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    task(folder, out)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cpu, after.ru_maxrss << 10)


def alone(name: str, folder: Path) -> Run:
    """In a fresh process, which has no children."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-m", "benchmarks.recsys.etl", "--task", name, str(folder), f"{out}/out"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Run(*json.loads(found))


def on_ranks(count: int, folder: Path) -> Run:
    """On fresh ranks, with one polars thread each."""
    with (
        Session(count, env={"POLARS_MAX_THREADS": "1"}) as session,
        tempfile.TemporaryDirectory(dir=folder) as out,
    ):
        threads = session.run_all(pl.thread_pool_size)
        if threads != [1] * count:
            raise RuntimeError(f"polars has {threads} threads in the ranks: it was imported before they were forked")
        found = session.run_all(measured, ours, folder, Path(out) / "out")
    return Run(max(run.seconds for run in found), max(run.cpu for run in found), sum(run.peak for run in found))


def rounds(contestants: dict[str, Callable[[], Run]], repeats: int) -> dict[str, list[Run]]:
    """Return what each takes, in turn, so that what disturbs one disturbs all."""
    found: dict[str, list[Run]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            found[name].append(run())
            print(f"{name}: {found[name][-1]}", file=sys.stderr)
    return found


def ratio(slow: list[Run], fast: list[Run]) -> float:
    """Return how many times faster it is: the median of the ratios within a round."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(slow, fast, strict=True))


def verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


def row(what: str, rows: int, found: list[Run]) -> str:
    seconds, cpu = (statistics.median(values) for values in (*zip(*found, strict=True),)[:2])
    peak = max(run.peak for run in found) / 1e6
    speed = rows / seconds / 1e6
    return f"| {what} | {rows / 1e6:g} M | {seconds:.1f} s | {speed:.2f} M | {cpu:.1f} s | {peak:,.0f} MB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, to see that everything works")
    parser.add_argument("--print", action="store_true", help="show the table without keeping it in results/")
    parser.add_argument("--task", nargs=3, metavar=("NAME", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        name, folder, out = options.task
        peers = {"pandas": with_pandas, "polars": with_polars, "duckdb": with_duckdb, "dask": with_dask}
        print(json.dumps(measured((peers | WITHOUT | {"ours": ours})[name], Path(folder), Path(out))))
        return

    small, large = (n // (10 if options.quick else 1) for n in (5_000_000, 25_000_000))
    with tempfile.TemporaryDirectory() as temporary:
        few, many = Path(temporary) / "few", Path(temporary) / "many"
        for folder, n in ((few, small), (many, large)):
            folder.mkdir()
            generate(folder, n)
        beside = rounds({name: lambda name=name: alone(name, few) for name in ("ours", "pandas")}, options.repeats)
        names = ("ours", "polars", "duckdb", "dask")
        whole = rounds({name: lambda name=name: alone(name, many) for name in (*names, *WITHOUT)}, options.repeats)
        ranked = rounds({str(n): lambda n=n: on_ranks(n, many) for n in (1, 2)}, options.repeats)

    faster, speedup = ratio(beside["pandas"], beside["ours"]), ratio(ranked["1"], ranked["2"])
    peaks = {name: max(run.peak for run in found) for name, found in whole.items()}
    compared = []
    for name in names[1:]:
        speed, share = ratio(whole[name], whole["ours"]), peaks["ours"] / peaks[name]
        compared += [
            f"| faster than {name}, {large / 1e6:g} M ratings | {speed:.2f} × | {REQUIRED['peers']:g} ×: "
            f"{verdict(speed >= REQUIRED['peers'])} |",
            f"| of the peak memory of {name} | {share:.2f} × | {REQUIRED['share']:g} ×: "
            f"{verdict(share <= REQUIRED['share'])} |",
        ]
    lines = [
        "# ETL",
        "",
        f"Ratings of {USERS:,} users × {MOVIES:,} movies joined with lists of genres; users, movies and genres "
        f"categorified; label; shuffled; written to {FILES} Parquet files. Median of {options.repeats} rounds, ratios "
        "within a round; each run in a process, or in ranks, of its own, its imports not counted. Memory is the peak "
        "of the whole process, libraries included. Of ranks: the slowest one's times, the memory of all together.",
        "",
        "| | ratings | time | rows/s | CPU time | peak memory |",
        "|---|---:|---:|---:|---:|---:|",
        row("nbdist", small, beside["ours"]),
        row("pandas", small, beside["pandas"]),
        row("nbdist", large, whole["ours"]),
        row("polars, a lazy query", large, whole["polars"]),
        row("DuckDB", large, whole["duckdb"]),
        row("Dask, its threads", large, whole["dask"]),
        row("nbdist, 1 rank, polars held to one thread", large, ranked["1"]),
        row("nbdist, 2 ranks, polars held to one thread each", large, ranked["2"]),
        "",
        "| | measured | required |",
        "|---|---:|---:|",
        f"| faster than pandas, {small / 1e6:g} M ratings | {faster:.1f} × | {REQUIRED['pandas']:g} ×: "
        f"{verdict(faster >= REQUIRED['pandas'])} |",
        *compared,
        f"| peak memory, {large / 1e6:g} M ratings | {peaks['ours'] / 1e9:.2f} GB | {REQUIRED['peak'] / 1e9:g} GB: "
        f"{verdict(peaks['ours'] < REQUIRED['peak'])} |",
        f"| 2 ranks over 1 rank, {large / 1e6:g} M ratings | {speedup:.2f} × | {REQUIRED['ranks']:g} ×: "
        f"{verdict(speedup >= REQUIRED['ranks'])} |",
        "",
        f"Where the time of {large / 1e6:g} M ratings goes: the same without a part of the work, compared with the "
        "whole within a round.",
        "",
        "| nbdist without | time | CPU time | of the whole time |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {statistics.median(run.seconds for run in whole[name]):.1f} s "
            f"| {statistics.median(run.cpu for run in whole[name]):.1f} s "
            f"| {ratio(whole[name], whole['ours']):.2f} |"
            for name in WITHOUT
        ),
        "",
        *machine.conditions(["polars", "duckdb", "dask", "pyarrow", "pandas", "numpy", "torch"]),
    ]
    if not options.print:
        shown = {"nbdist": "ours", "polars": "polars", "DuckDB": "duckdb", "Dask": "dask"}
        lines += plots.bars(
            "etl",
            {
                f"seconds, {large / 1e6:g} M ratings": {
                    name: [run.seconds for run in whole[key]] for name, key in shown.items()
                },
                "peak memory, GB": {name: [run.peak / 1e9 for run in whole[key]] for name, key in shown.items()},
            },
            ours=["nbdist"],
        )
    machine.save("etl", lines, keep=not options.print)


if __name__ == "__main__":
    main()

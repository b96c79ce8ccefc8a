"""Cost of `session.profile` for a training: the same call with and without it, in turns."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from benchmarks.machine import conditions, name_of, save
from nbdist import Session
from nbdist.recsys.datasets import movielens

#: More of the time of a call than this is too much.
TARGET = 0.05


def train(data: str, batch_size: int) -> int:
    """In a rank: an epoch of fastai's collaborative learner; how many steps it had."""
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)
    import pandas as pd
    from fastai.collab import CollabDataLoaders, collab_learner

    dls = CollabDataLoaders.from_df(pd.read_parquet(data), item_name="title", bs=batch_size, seed=42)
    learn = collab_learner(dls, n_factors=50, y_range=(0, 5.5))
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(in_notebook=False):
        learn.fit_one_cycle(1, 5e-3, wd=0.1)
    return len(learn.recorder.losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    ratings = movielens("100k", synthetic=True)
    lines = [
        "# What a profile costs",
        "",
        f"An epoch of fastai's collaborative learner with `distrib_ctx` on 2 ranks, {name_of(ratings.source)}; "
        f"10 steps are profiled. Seconds of the whole call until its result is there, median of {options.rounds} calls "
        "of each sort in turns; then of drawing the picture, which reads the ranks' traces.",
        "",
        "| batch of a rank | steps | run | profile | more | picture |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file, Session(2, devices="cpu") as session:
        ratings.with_titles().write_parquet(file.name)
        for batch_size in (32, 128):
            steps = session.run(train, file.name, batch_size)  # what is imported and read once
            session.profile(train, file.name, batch_size)
            taken: dict[str, list[float]] = {"run": [], "profile": [], "picture": []}
            for turn in range(options.rounds):
                for name in ("run", "profile")[:: 1 if turn % 2 else -1]:
                    begin = time.perf_counter()
                    found = getattr(session, name)(train, file.name, batch_size)
                    taken[name].append(time.perf_counter() - begin)
                    if name == "profile":
                        begin = time.perf_counter()
                        found._repr_html_()
                        taken["picture"].append(time.perf_counter() - begin)
            run, profile, picture = (statistics.median(taken[name]) for name in taken)
            more = profile / run - 1
            cost = f"{100 * more:.1f} %" + ("" if more <= TARGET else " **too much**")
            lines.append(f"| {batch_size} | {steps} | {run:.2f} s | {profile:.2f} s | {cost} | {picture:.2f} s |")
    save("profile", [*lines, "", *conditions(("torch", "fastai"))], keep=not options.print)


if __name__ == "__main__":
    main()

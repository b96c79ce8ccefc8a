"""fastai's collaborative learner: how long until the loss at which a plain process ends, and what an epoch takes.

The chapter's settings (50 factors, batch 64, five epochs of one-cycle at 5e-3, weight decay 0.1) in one plain process
give the loss to be reached. Contestants take turns; the validation after each epoch is part of the time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks.machine import conditions, name_of, save
from nbdist import Session
from nbdist.recsys.datasets import movielens

EPOCHS, RATE, DECAY = 5, 5e-3, 0.1
#: Of the runs that tell what an epoch takes.
MANY = 10


class Contestant(NamedTuple):
    """How a learner is trained; `batch` rows a step over all ranks."""

    name: str
    ranks: int
    batch: int
    epochs: int = EPOCHS
    rate: float = RATE
    fast: bool = False
    threads: int = 1


PLAIN = Contestant("plain fastai, one process", 1, 64)
TO_QUALITY = [
    PLAIN,
    Contestant("plain fastai with two threads", 1, 64, threads=2),
    Contestant("`distrib_ctx`, 2 ranks", 2, 64),
    Contestant("`fast`, 1 rank", 1, 64, epochs=4, fast=True),
    Contestant("`fast`, 2 ranks", 2, 64, epochs=4, fast=True),
    Contestant("`fast`, 1 rank, batch 256", 1, 256, epochs=4, rate=7e-3, fast=True),
    Contestant("`fast`, 1 rank, batch 256, two threads", 1, 256, epochs=4, rate=7e-3, fast=True, threads=2),
    Contestant("`fast`, 2 ranks, batch 256", 2, 256, epochs=4, rate=7e-3, fast=True),
    Contestant("`fast`, 1 rank, batch 1,024", 1, 1024, epochs=5, rate=2e-2, fast=True),
    Contestant("`fast`, 2 ranks, batch 1,024", 2, 1024, epochs=5, rate=2e-2, fast=True),
]
EPOCH = [
    Contestant(f"{name}{batch}", ranks, batch, fast=quick)
    for batch in (64, 512, 4096)
    for name, ranks, quick in (
        ("plain, ", 1, False),
        ("2 ranks, ", 2, False),
        ("`fast`, 1 rank, ", 1, True),
        ("`fast`, 2 ranks, ", 2, True),
    )
]


def train(contestant: Contestant, data: str, epochs: int) -> list[tuple[float, float]]:
    """Of each epoch: the seconds since the beginning, and the validation loss."""
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)
    import pandas as pd
    import torch
    from fastai.callback.core import Callback
    from fastai.collab import CollabDataLoaders, collab_learner
    from fastai.torch_core import set_seed

    from nbdist.recsys.fastai import fast

    torch.set_num_threads(contestant.threads)
    set_seed(42)
    bs = contestant.batch // contestant.ranks
    dls = CollabDataLoaders.from_df(pd.read_parquet(data), item_name="title", bs=bs, seed=42)
    learn = collab_learner(dls, n_factors=50, y_range=(0, 5.5))
    learn = fast(learn) if contestant.fast else learn
    seen: list[tuple[float, float]] = []

    def note(self: Any) -> None:
        seen.append((time.perf_counter() - begin, float(self.recorder.log[2])))

    callback = Callback(after_validate=note)
    callback.order = 60  # after the recorder
    with learn.no_bar(), learn.no_logging(), learn.added_cbs(callback):
        begin = time.perf_counter()
        if contestant.ranks > 1:
            with learn.distrib_ctx():
                learn.fit_one_cycle(epochs, contestant.rate, wd=DECAY)
        else:
            learn.fit_one_cycle(epochs, contestant.rate, wd=DECAY)
    return seen


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn of a tenth of the ratings")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    turns = 1 if options.quick else options.turns
    ratings = movielens("100k", synthetic=True)
    frame = ratings.with_titles().to_pandas()
    with tempfile.TemporaryDirectory() as folder, Session(1, threads=2) as one, Session(2, threads=1) as two:
        data = f"{folder}/ratings.parquet"
        frame.sample(frac=0.1 if options.quick else 1.0, random_state=0).to_parquet(data)

        def run(contestant: Contestant, epochs: int) -> list[tuple[float, float]]:
            return (one if contestant.ranks == 1 else two).run(train, contestant, data, epochs)

        for contestant in (PLAIN, Contestant("", 2, 4096, fast=True)):  # what is imported at first use
            run(contestant._replace(batch=4096), 1)
        times: dict[str, list[float]] = {}
        reached: dict[str, float] = {}
        for _ in range(turns):
            target = 0.0
            for contestant in TO_QUALITY:
                seen = run(contestant, contestant.epochs)
                target = target or seen[-1][1]
                reached[contestant.name] = min(loss for _, loss in seen)
                there = [seconds for seconds, loss in seen if loss <= target]
                times.setdefault(contestant.name, []).extend(there[:1])
                print(contestant.name, [(round(s, 2), round(x, 4)) for s, x in seen], flush=True)
        epochs: dict[str, list[float]] = {}
        for _ in range(turns):
            for contestant in EPOCH:
                epochs.setdefault(contestant.name, []).append(run(contestant, MANY)[-1][0] / MANY)
    plain = statistics.median(times[PLAIN.name])
    lines = [
        "# fastai's collaborative learner: time to quality",
        "",
        f"{name_of(ratings.source)}. One thread a rank where nothing is said. The loss "
        f"to be reached: {reached[PLAIN.name]:.4f}, that of the plain process after its {EPOCHS} epochs.",
        "",
        "| | epochs | loss reached | seconds to the plain loss | of plain |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {c.name} | {c.epochs} | {reached[c.name]:.4f} | "
            + (
                f"{_spread(times[c.name])} | {statistics.median(times[c.name]) / plain:.2f} |"
                if times[c.name]
                else "not reached | |"
            )
            for c in TO_QUALITY
        ),
        "",
        f"Seconds an epoch, the mean of {MANY}, the entering of `distrib_ctx` and the validation included; rows a step "
        "over all ranks:",
        "",
        "| | seconds | of plain at that batch |",
        "|---|---:|---:|",
        *(
            f"| {c.name} | {_spread(epochs[c.name])} | "
            f"{statistics.median(epochs[c.name]) / statistics.median(epochs[f'plain, {c.batch}']):.2f} |"
            for c in EPOCH
        ),
        "",
        *conditions(("torch", "fastai")),
    ]
    save("time_to_quality", lines, keep=not options.print)


if __name__ == "__main__":
    main()

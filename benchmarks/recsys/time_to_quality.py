"""fastai's collaborative learner: how long until the loss at which a plain process ends, and what an epoch takes.

The chapter's settings (50 factors, batch 64, five epochs of one-cycle at 5e-3, weight decay 0.1) in one plain process,
where nothing of nbdist is, give the loss to be reached. Contestants take turns; the validation after each epoch is part
of the time. What takes longer than a minute is done once, the other things in each turn.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from benchmarks import plots
from benchmarks.machine import conditions, save_section, title_of
from benchmarks.recsys.turns import parsed, spread
from nbdist import Session
from nbdist.recsys.datasets import movielens

EPOCHS, RATE, DECAY = 5, 5e-3, 0.1
#: The number of runs that show what an epoch takes.
MANY = 10
#: Seconds. A run that takes longer is not repeated: what disturbs a machine for a moment is little of it.
LONG = 60


class Contestant(NamedTuple):
    """A way to train a learner; `batch` rows a step over all ranks. Without ranks: in a process without nbdist."""

    name: str
    ranks: int
    batch: int
    epochs: int = EPOCHS
    rate: float = RATE
    fast: bool = False
    threads: int = 1
    local: int | None = None


PLAIN = Contestant("plain fastai, one process", 0, 64)
TO_QUALITY = [
    PLAIN,
    PLAIN._replace(name="plain fastai with two threads", threads=2),
    Contestant("`distrib_ctx`, 2 ranks × 32", 2, 64),
    Contestant("`fast`, 1 rank × 64", 1, 64, 4, fast=True),
    Contestant("`fast`, 2 ranks × 32", 2, 64, 4, fast=True),
    Contestant("`fast`, 1 rank × 256", 1, 256, 3, 7e-3, fast=True),
    Contestant("`fast`, 1 rank × 256, two threads", 1, 256, 3, 7e-3, fast=True, threads=2),
    Contestant("`fast`, 2 ranks × 128", 2, 256, 3, 7e-3, fast=True),
    Contestant("`fast`, 2 ranks × 256, local SGD", 2, 512, 3, 1e-2, fast=True, local=64),
]
#: The best of 250 settings (100k) and 240 (1m) of batch, epochs, rate and steps of local SGD, for one rank and for two.
BEST = {
    "100k": [
        Contestant("`fast`, 1 rank × 2,048", 1, 2048, 3, 2e-2, fast=True),
        Contestant("`fast`, 1 rank × 2,048, two threads", 1, 2048, 3, 2e-2, fast=True, threads=2),
        Contestant("`fast`, 2 ranks × 2,048, local SGD", 2, 4096, 3, 4e-2, fast=True, local=4),
    ],
    "1m": [
        Contestant("`fast`, 1 rank × 8,192", 1, 8192, 2, 2e-2, fast=True),
        Contestant("`fast`, 1 rank × 8,192, two threads", 1, 8192, 2, 2e-2, fast=True, threads=2),
        Contestant("`fast`, 2 ranks × 8,192, local SGD", 2, 16384, 2, 4e-2, fast=True, local=4),
    ],
}
EPOCH = [
    Contestant(name.format(batch, batch // 2), ranks, batch, fast=quick, local=local)
    for batch in (64, 512, 4096)
    for name, ranks, quick, local in (
        ("plain × {:,}", 0, False, None),
        ("`distrib_ctx`, 2 ranks × {1:,}", 2, False, None),
        ("`fast`, 1 rank × {:,}", 1, True, None),
        ("`fast`, 2 ranks × {1:,}", 2, True, None),
        ("`fast`, 2 ranks × {1:,}, local SGD", 2, True, 16),
    )
]
#: What an unchanged `distrib_ctx` may take of a plain epoch, by batch.
ALLOWED = {64: 1.15, 512: 0.9, 4096: 0.65}


Run = Callable[[Contestant, int], "list[tuple[float, float]]"]
"""Trains a contestant for a number of epochs, and returns seconds and loss after each."""


def train(contestant: Contestant, data: str, epochs: int) -> list[tuple[float, float]]:
    """Return for each epoch the seconds since the beginning, and the validation loss."""
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)
    import pandas as pd
    import torch
    import torch.distributed as dist
    from fastai.callback.core import Callback
    from fastai.collab import CollabDataLoaders, collab_learner
    from fastai.torch_core import set_seed

    torch.set_num_threads(contestant.threads)
    set_seed(42)
    bs = contestant.batch // max(contestant.ranks, 1)
    dls = CollabDataLoaders.from_df(pd.read_parquet(data), item_name="title", bs=bs, seed=42)
    learn = collab_learner(dls, n_factors=50, y_range=(0, 5.5))
    if contestant.fast:
        from nbdist.fastai import fast

        fast(learn, contestant.local)
    seen: list[tuple[float, float]] = []

    def note(self: Any) -> None:
        seen.append((time.perf_counter() - begin, float(self.recorder.log[2])))

    callback = Callback(after_validate=note)
    callback.order = 60  # after the recorder
    with learn.no_bar(), learn.no_logging(), learn.added_cbs(callback):
        if contestant.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        if contestant.ranks > 1:
            with learn.distrib_ctx():
                learn.fit_one_cycle(epochs, contestant.rate, wd=DECAY)
        else:
            learn.fit_one_cycle(epochs, contestant.rate, wd=DECAY)
    return seen


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(one) / statistics.median(other)


def _to_quality(run: Run, contestants: list[Contestant], turns: int) -> tuple[list[str], dict[str, plots.Curve]]:
    """A table of the seconds until the loss at which the plain process ends; and the curves of the first turn."""
    times: dict[str, list[float]] = {}
    reached: dict[str, float] = {}
    curves: dict[str, plots.Curve] = {}
    target = 0.0
    for _ in range(turns):
        for contestant in contestants:
            name = contestant.name
            if name in curves and curves[name][-1][0] > LONG:
                continue
            seen = run(contestant, contestant.epochs)
            target = target or seen[-1][1]
            reached[name] = min(loss for _, loss in seen)
            curves.setdefault(name, seen)
            there = [seconds for seconds, loss in seen if loss <= target]
            times.setdefault(name, []).extend(there[:1])
            print(name, [(round(s, 2), round(x, 4)) for s, x in seen], flush=True)
    lines = [
        f"Each process has one thread, unless the row says otherwise. The loss to be reached is {target:.4f}, the loss "
        f"of the plain process after its {EPOCHS} epochs.",
        "",
        "| | epochs | loss reached | seconds to the plain loss | of plain |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {c.name} | {c.epochs} | {reached[c.name]:.4f} | "
            + (
                f"{spread(times[c.name])} | {_ratio(times[c.name], times[PLAIN.name]):.3f} |"
                if times[c.name]
                else "not reached | |"
            )
            for c in contestants
        ),
        "",
        *(line for c in contestants if c.local for line in _beside_one_rank(c, contestants, times)),
    ]
    return lines, curves


def _beside_one_rank(two: Contestant, contestants: list[Contestant], times: dict[str, list[float]]) -> list[str]:
    """Return what two ranks take of one whose steps have as many rows as each of theirs."""
    ones = [c for c in contestants if c.fast and c.ranks == 1 and c.batch == two.batch // 2]
    return [
        f"{two.name}: {_ratio(times[two.name], times[one.name]):.2f} of {one.name} (required: {required}).\n"
        for one in ones
        for required in [0.65 if one.threads == 1 else 1.0]
        if times[two.name] and times[one.name]
    ]


def _epochs(run: Run, turns: int) -> list[str]:
    """A table of the seconds that an epoch takes."""
    epochs: dict[str, list[float]] = {}
    for _ in range(turns):
        for contestant in EPOCH:
            epochs.setdefault(contestant.name, []).append(run(contestant, MANY)[-1][0] / MANY)
    lines = [
        f"Seconds an epoch, the mean of {MANY}, the entering of `distrib_ctx` and the validation included:",
        "",
        "| | seconds | of plain at that batch | required |",
        "|---|---:|---:|---:|",
    ]
    for c in EPOCH:
        ratio = _ratio(epochs[c.name], epochs[f"plain × {c.batch:,}"])
        wanted = ALLOWED[c.batch] if c.ranks == 2 and not c.fast else None
        verdict = "" if wanted is None else f"{wanted}: {'reached' if ratio <= wanted else '**missed**'}"
        lines.append(f"| {c.name} | {spread(epochs[c.name])} | {ratio:.2f} | {verdict} |")
    return [*lines, ""]


def main() -> None:
    options = parsed(__doc__)
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(1, threads=2) as one,
        Session(2, threads=1) as two,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as outside,
    ):
        data = f"{folder}/ratings.parquet"

        def run(contestant: Contestant, epochs: int) -> list[tuple[float, float]]:
            if contestant.ranks:
                return (one if contestant.ranks == 1 else two).run(train, contestant, data, epochs)
            return outside.submit(train, contestant, data, epochs).result()

        for size in options.sets:
            ratings = movielens(size, synthetic=True)
            frame = ratings.with_titles().to_pandas()
            frame.sample(frac=0.1 if options.quick else 1.0, random_state=0).to_parquet(data)
            for contestant in (PLAIN, *EPOCH[1:5]):  # what is imported at first use
                run(contestant._replace(batch=4096), 1)
            title = title_of(size, ratings.source)
            lines, curves = _to_quality(run, TO_QUALITY + BEST[size], options.turns)
            if size == "100k":
                lines += _epochs(run, options.turns)
            lines += conditions(("torch", "fastai"))
            if not options.print:
                target = curves[PLAIN.name][-1][1]
                lines += plots.curves(f"time_to_quality_{size}", title, "validation loss", curves, target)
            save_section("time_to_quality", title, lines, keep=not options.print)


if __name__ == "__main__":
    main()

"""Notebook 01's model: epochs of plain fastai without ranks, on a GPU rank, and on a CPU rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist

from nbdist import in_ddp

from .notes import attempt, note, seconds

LIMIT = 110.0
NEEDS = ("fastai", "pandas")
RATINGS = 100_000
#: Batch → epochs; the fastest one counts, the first one left out.
EPOCHS = {64: 2, 512: 4, 4096: 9}
FASTAI = "from fastai.collab import *; from fastai.distributed import *"
#: How much slower than plain fastai an epoch may be, for noise.
NOISE = 1.05


def ratings(count: int) -> Any:
    """Make as many ratings as MovieLens 100k has, of as many users and films, whose tastes differ."""
    import numpy as np
    import pandas as pd

    draw = np.random.default_rng(0)
    user, film = ((draw.random(count) ** 2 * size).astype(int) for size in (943, 1682))
    liked = 3.5 + 1.5 * np.sin(user * 0.7) * np.cos(film * 1.3) + draw.normal(0, 0.5, count)
    titles = [f"film {number}" for number in film]
    return pd.DataFrame({"user": user, "title": titles, "rating": np.clip(np.round(liked), 1, 5).astype("float32")})


def epoch(batch: int, quickly: bool, count: int) -> tuple[float, float, str]:
    """In a rank, or in a process without ranks: seconds of an epoch, its validation loss, and the device."""
    import torch
    from fastai.collab import CollabDataLoaders, collab_learner

    torch.manual_seed(0)
    learn = collab_learner(CollabDataLoaders.from_df(ratings(count), bs=batch, seed=42), n_factors=50, y_range=(0, 5.5))
    if quickly:
        from nbdist.fastai import fast

        fast(learn)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx() if dist.is_initialized() else contextlib.nullcontext():
        took = [seconds(lambda: learn.fit_one_cycle(1, 5e-3, wd=0.1)) for _ in range(EPOCHS[batch])]
    return min(took[1:]), float(learn.recorder.values[-1][-1]), next(learn.model.parameters()).device.type


def run(device: str) -> None:
    count = 6_000 if device == "cpu" else RATINGS
    alone: dict[int, float] = {}
    for batch, quickly, where in [
        (4096, False, "alone"),
        (4096, False, device),
        (4096, True, device),
        (512, False, "alone"),
        (512, False, device),
        (512, True, device),
        (64, False, "alone"),
        (64, True, device),
        (4096, True, "cpu"),
    ]:
        how = "`fast`" if quickly else "plain fastai"
        place = "without ranks, on the GPU" if where == "alone" else f"on one rank, {where}"
        what = f"an epoch, batch {batch:,}, {how}, {place}"
        with attempt(what):
            if where == "alone":
                took, loss, _ = in_ddp(0, epoch, batch, quickly, count, imports=FASTAI)
                alone[batch] = took
                note(what, f"{took:.3f} s, validation loss {loss:.4f}")
                continue
            took, loss, _ = in_ddp.options(devices=where, imports=FASTAI)(1, epoch, batch, quickly, count)
            ratio = took / alone[batch]
            gpu = where != "cpu" or device == "cpu"
            note(
                what,
                f"{took:.3f} s, {ratio:.2f} × plain fastai without ranks, validation loss {loss:.4f}",
                met=ratio <= NOISE if gpu and batch == 4096 else None,
                bar="no slower than plain fastai" if gpu and batch == 4096 else "",
            )

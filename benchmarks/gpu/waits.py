"""Places where a step of `fit` makes the host wait for the GPU, as CUDA itself reports it."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import torch

from nbdist import in_ddp, rank_device

from . import click_model
from .notes import attempt, note

LIMIT = 45.0
NEEDS = ("pyarrow", "torchmetrics")
STEPS = 4


def waits(sparse: bool) -> tuple[int, list[str]]:
    """In a rank: how often some steps have made the host wait, and the places."""
    from nbdist.recsys.loader import MemoryLoader
    from nbdist.recsys.sharding import replicate
    from nbdist.recsys.training import fit

    device = rank_device()
    model = replicate(click_model.Clicks(16, sparse=sparse), lambda some: torch.optim.Adagrad(some, lr=0.01))
    train = MemoryLoader(click_model.rows_of(click_model.SIZES, 200_000), 2048, shuffle=True, remainder="drop")
    options: dict[str, Any] = {"progress": False, "log_every": 1000}
    fit(model, click_model.predict, train, steps=20, **options)
    places: list[str] = []

    def seen(*_: Any, **__: Any) -> None:
        frames = [one for one in traceback.extract_stack()[:-1] if "warnings" not in one.filename]
        places.append(" < ".join(f"{one.filename.split('/')[-1]}:{one.lineno}" for one in reversed(frames[-6:])))

    counts = []
    for steps in (STEPS, STEPS, 2 * STEPS):  # the difference of the last two counts the steps alone
        places.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = seen  # type: ignore[assignment]
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            fit(model, click_model.predict, train, steps=steps, **options)
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        counts.append(len(places))
    return counts[2] - counts[1], sorted(set(places))


def run(device: str) -> None:
    for sparse in (True, False):
        what = f"waits of the host in {STEPS} steps of `fit`, {'sparse' if sparse else 'dense'} gradients of tables"
        with attempt(what):
            count, places = in_ddp.options(devices=device)(1, waits, sparse)
            note(what, f"{count}", met=count == 0 if not sparse else None, bar="" if sparse else "0", places=places)

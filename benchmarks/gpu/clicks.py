"""Rows per second of `fit` on the click model, beside what the GPU can do."""

from __future__ import annotations

from nbdist import in_ddp

from . import models
from .notes import attempt, note

LIMIT = 120.0
NEEDS = ("pyarrow", "torchmetrics")


def run(device: str) -> None:
    steps, count = (3, 20_000) if device == "cpu" else (300, 4_000_000)
    for width, batch in ((16, 2048), (16, 65_536), (64, 65_536)):
        for sparse in (True, False):
            what = f"`fit`, width {width}, batch {batch:,}, {'sparse' if sparse else 'dense'}"
            with attempt(what):
                found = in_ddp.options(devices=device)(1, models.fitted, width, batch, steps, sparse, count)
                note(what, f"{found / 1e6:.2f} M rows/s")

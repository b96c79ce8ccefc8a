"""What the GPU does in steps of `fit`: the operations that take most of its time."""

from __future__ import annotations

from typing import Any

import torch

from nbdist import Session

from . import models
from .notes import attempt, note

LIMIT = 60.0
NEEDS = ("pyarrow", "torchmetrics")


def look(batch: int, device: str, options: dict[str, Any]) -> tuple[float, str]:
    """In a rank: rows per second of 30 steps, and the profiler's table."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as seen:
        speed = models.fitted(16, batch, 30, count=200_000, **options)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return speed, seen.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=60)


def run(device: str) -> None:
    torch.set_num_threads(1)
    with Session(1, devices=device) as session:
        for batch in (2048, 65_536):
            with attempt(f"profile, batch {batch:,}"):
                speed, table = session.run(look, batch, device, {})
                note(f"rows per second under the profiler, batch {batch:,}", f"{speed / 1e6:.2f} M", table=table)

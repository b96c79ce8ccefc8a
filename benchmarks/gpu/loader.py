"""Batches on the GPU, compared with one pinned copy of as many bytes."""

from __future__ import annotations

import torch

from nbdist import in_ddp, rank_device

from .notes import median, note, seconds

LIMIT = 60.0
NEEDS = ("pyarrow",)
ROWS, BATCH = 4_000_000, 65_536
BAR = 0.8


def copies(count: int) -> dict[str, float]:
    """In a rank: bytes per second of the loader in several ways, and of one pinned copy."""
    from nbdist.recsys.loader import MemoryLoader, Ragged

    device = rank_device()
    columns = {f"id{number}": torch.randint(1 << 40, (count,)) for number in range(8)}
    size = sum(column.nbytes for column in columns.values())
    resident, shuffled = MemoryLoader(columns, BATCH), MemoryLoader(columns, BATCH, shuffle=True)
    # With a column of lists, none of them large, batches are gathered on the CPU.
    lists = Ragged(torch.zeros(count, dtype=torch.uint8), torch.arange(count + 1))
    through = MemoryLoader({**columns, "lists": lists}, BATCH, shuffle=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def epoch(loader: MemoryLoader) -> None:
        for _ in loader:
            pass
        wait()

    block = torch.empty(size // 16, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(block, device=device)

    def copy() -> None:
        for _ in range(16):
            there.copy_(block, non_blocking=True)
        wait()

    begin = seconds(lambda: epoch(resident))
    return {
        "first": size / begin,
        "resident": size / median(lambda: seconds(lambda: epoch(resident)), 3),
        "shuffled": size / median(lambda: seconds(lambda: epoch(shuffled)), 3),
        "through": size / median(lambda: seconds(lambda: epoch(through)), 3),
        "bus": size / median(lambda: seconds(copy), 3),
    }


def run(device: str) -> None:
    found = in_ddp.options(devices=device)(1, copies, 200_000 if device == "cpu" else ROWS)
    bus = found["bus"]
    note("a pinned copy to the GPU", f"{bus / 1e9:.1f} GB/s")
    for what, key in {
        f"the loader, {BATCH:,} rows of 8 columns a batch": "resident",
        "its first epoch, in which the columns are copied": "first",
        "shuffled": "shuffled",
        "shuffled, with a column of lists, so that batches are gathered on the CPU": "through",
    }.items():
        part = found[key] / bus
        bar = f"at least {BAR:.0%}" if key == "resident" else ""
        note(what, f"{found[key] / 1e9:.1f} GB/s, {part:.0%} of it", met=part >= BAR if bar else None, bar=bar)

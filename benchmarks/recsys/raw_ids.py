"""Training with a table of raw ids at 90 % of its capacity, compared with `nn.Embedding(sparse=True)`.

Both are `replicate`'s, trained by Adagrad on the same ids, and take turns of some steps in the same ranks. A part of
the ids is new in each step: the table admits them and evicts others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from benchmarks.machine import conditions, save
from benchmarks.recsys.turns import spread
from nbdist import Session
from nbdist.recsys.parallel.replicated import replicate
from nbdist.recsys.raw_ids import RawIds, RawTable

ROWS, BATCH, STEPS = 200_000, 4_096, 10
NEW = 0.01
"""The part of the ids of a batch that are new."""


def batches(count: int, rows: int, new: float, seed: int) -> list[torch.Tensor]:
    """Return ids of all ranks' batches, some of them popular; those above `rows` are new."""
    draw = torch.Generator().manual_seed(seed)
    found = (torch.rand(count, BATCH, generator=draw) ** 2 * rows).long()
    fresh = torch.rand(count, BATCH, generator=draw) < new
    numbers = rows + seed * count * BATCH + torch.arange(count * BATCH).view(count, BATCH)
    return list(torch.where(fresh, numbers, found))


def measured(width: int, new: float, turns: int, rows: int) -> dict[str, list[tuple[float, float]]]:
    """In a rank: return the seconds, and the CPU seconds of this rank, of each turn, by contestant."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(), dist.get_rank()
    raw: Any = replicate(RawTable(width, RawIds(capacity=int(rows / 0.9))), "adagrad", lr=0.1)
    plain: Any = replicate(nn.Embedding(rows, width, sparse=True), "adagrad", lr=0.1)

    def steps(contestant: Any, ids: list[torch.Tensor]) -> tuple[float, float]:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for batch in ids:
            contestant.optimizer.zero_grad()
            contestant.model(batch.tensor_split(size)[rank]).square().mean().backward()
            contestant.optimizer.step()
        dist.barrier()
        return time.perf_counter() - began, time.process_time() - cpu

    for part in torch.arange(rows).split(BATCH):  # each id has its row before the first turn
        raw.model(part.tensor_split(size)[rank])
        raw.optimizer.zero_grad()
    found: dict[str, list[tuple[float, float]]] = {"raw": [], "plain": []}
    for turn in range(turns + 1):
        ids = batches(STEPS, rows, new, turn)
        taken = {"raw": steps(raw, ids), "plain": steps(plain, [batch % rows for batch in ids])}
        for name, seconds in taken.items() if turn else ():  # the first turn makes the optimizers' state
            found[name].append(seconds)
    return found


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="two turns of small tables")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    turns, rows = (2, 5_000) if options.quick else (options.turns, ROWS)
    lines = [
        f"Tables of {rows:,} rows, the raw one at 90 % of its capacity; {BATCH:,} ids a step over all ranks. {turns} "
        f"turns of {STEPS} steps, in which both take turns; medians of the ratios within a turn, and their spread. "
        "On a busy machine the ratio of the CPU seconds of rank 0 says more than the ratio of the time.",
        "",
        "| ranks | numbers of a row | new ids in a batch | raw ids, ids/s | `nn.Embedding`, ids/s | ratio "
        "| ratio by CPU seconds |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in options.ranks:
        with Session(ranks) as session:
            for width, new in ((16, 0.0), (64, 0.0), (64, NEW)):
                found = session.run(measured, width, new, turns, rows)
                pairs = list(zip(found["raw"], found["plain"], strict=True))
                ratios = " | ".join(spread([plain[i] / raw[i] for raw, plain in pairs]) for i in (0, 1))
                raw, plain = (statistics.median(seconds for seconds, _ in found[name]) for name in ("raw", "plain"))
                speeds = f"{BATCH * STEPS / raw:,.0f} | {BATCH * STEPS / plain:,.0f}"
                lines.append(f"| {ranks} | {width} | {new:.0%} | {speeds} | {ratios} |")
                print(lines[-1], flush=True)
    head = ["# Tables of raw ids", "", *lines, "", "Not run on a GPU: none was at hand.", ""]
    save("raw_ids", [*head, *conditions(["torch"])], keep=not (options.print or options.quick))


if __name__ == "__main__":
    main()

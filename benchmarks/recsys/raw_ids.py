"""Training with a table of raw ids at 90 % of its capacity, compared with `nn.Embedding(sparse=True)`.

Both are `replicate`'s, trained by Adagrad on the same ids, and take turns of some steps in the same ranks. A part of
the ids is new in each step: the table admits them and evicts others.

A second table compares rows in memory with rows in files (`RawIds(folder=)`): while all pages of the files are in
memory, and with none of them there at the beginning of each turn.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
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


def steps(contestant: Any, ids: list[torch.Tensor]) -> tuple[float, float]:
    """In a rank: make steps, and return their seconds, and the CPU seconds of this rank."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(), dist.get_rank()
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    for batch in ids:
        contestant.optimizer.zero_grad()
        contestant.model(batch.tensor_split(size)[rank]).square().mean().backward()
        contestant.optimizer.step()
    dist.barrier()
    return time.perf_counter() - began, time.process_time() - cpu


def filled(width: int, rows: int, **options: Any) -> Any:
    """In a rank: return a table in which each id below `rows` has its row."""
    import torch.distributed as dist

    raw: Any = replicate(RawTable(width, RawIds(**options)), "adagrad", lr=0.1)
    for part in torch.arange(rows).split(BATCH):
        raw.model(part.tensor_split(dist.get_world_size())[dist.get_rank()])
        raw.optimizer.zero_grad()
    return raw


def measured(width: int, new: float, turns: int, rows: int) -> dict[str, list[tuple[float, float]]]:
    """In a rank: return the seconds, and the CPU seconds of this rank, of each turn, by contestant."""
    raw = filled(width, rows, capacity=int(rows / 0.9))
    plain: Any = replicate(nn.Embedding(rows, width, sparse=True), "adagrad", lr=0.1)
    found: dict[str, list[tuple[float, float]]] = {"raw": [], "plain": []}
    for turn in range(turns + 1):
        ids = batches(STEPS, rows, new, turn)
        taken = {"raw": steps(raw, ids), "plain": steps(plain, [batch % rows for batch in ids])}
        for name, seconds in taken.items() if turn else ():  # the first turn makes the optimizers' state
            found[name].append(seconds)
    return found


def measured_in_files(width: int, turns: int, rows: int, folder: str) -> dict[str, list[float]]:
    """In a rank: return the seconds of each turn, with rows in memory and in files."""
    memory, files = filled(width, rows), filled(width, rows, folder=folder)
    page_out = 21  # MADV_PAGEOUT
    found: dict[str, list[float]] = {"memory": [], "files": [], "no page": []}
    for turn in range(turns + 1):
        ids = batches(STEPS, rows, 0.0, turn)
        weight = files.module.weight
        for tensor in (weight.detach(), files.optimizer.state[weight].get("sum", weight.detach())):
            tensor.sum()  # reads all pages
        taken = {"memory": steps(memory, ids)[0], "files": steps(files, ids)[0]}
        os.sync()
        for tensor in (weight.detach(), files.optimizer.state[weight]["sum"]):
            if ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), page_out):
                raise OSError("madvise failed")
        taken["no page"] = steps(files, ids)[0]
        for name, seconds in taken.items() if turn else ():
            found[name].append(seconds)
    return found


def files_table(turns: int, rows: int, folder: str | None) -> list[str]:
    """Compare rows in memory with rows in files, on one rank."""
    lines = [
        "",
        f"The same table on one rank with its rows and their state in files, {turns} turns of {STEPS} steps:",
        "",
        "| numbers of a row | rows in memory, ids/s | in files whose pages are in memory, ids/s | ratio "
        "| in files, no page in memory at first, ids/s | ratio |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    with Session(1) as session, tempfile.TemporaryDirectory(dir=folder) as place:
        for width in (16, 64):
            found = session.run(measured_in_files, width, turns, rows, place)
            speeds = {name: BATCH * STEPS / statistics.median(seconds) for name, seconds in found.items()}
            cells = [f"{speeds['memory']:,.0f}"]
            for name in ("files", "no page"):
                ratios = [one / other for one, other in zip(found["memory"], found[name], strict=True)]
                cells += [f"{speeds[name]:,.0f}", spread(ratios)]
            lines.append(f"| {width} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="of the files, on a disk; the default is that of temporary files")
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
    lines += files_table(turns, rows, options.folder)
    head = ["# Tables of raw ids", "", *lines, "", "Not run on a GPU: none was at hand.", ""]
    save("raw_ids", [*head, *conditions(["torch"])], keep=not (options.print or options.quick))


if __name__ == "__main__":
    main()

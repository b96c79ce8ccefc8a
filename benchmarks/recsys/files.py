"""Training a click model whose tables are in memory or in files.

The result is a section of the page of `benchmarks.recsys.training`. Run this benchmark after that one, which replaces
the page.

Codes are ids, so a table of raw ids in files (`RawIds(folder=)`) takes the place of a table of codes that is larger
than memory. All contestants begin with the same rows, see the same batches, and must have the same loss after the first
turns.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.machine import conditions, save_section
from benchmarks.recsys.training import TABLES, WIDTHS, Sparse, adagrad, predict_sparse, rows_for
from benchmarks.recsys.turns import spread
from nbdist import Session
from nbdist.recsys.raw_ids import RawIds, RawTable
from nbdist.recsys.raw_ids.table import Records
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training.objective import log_loss

PLAIN, MEMORY, FILES, COLD = (
    "`nn.Embedding(sparse=True)`, in memory",
    "`RawIds()`, in memory",
    "`RawIds(folder=)`, pages in memory",
    "`RawIds(folder=)`, no page in memory at first",
)
_PAGE_OUT = 21  # MADV_PAGEOUT


def made(kind: str, width: int, folder: str) -> Any:
    """In a rank: the model of `benchmarks.recsys.training` on two tables, with the weights that all have."""
    torch.manual_seed(0)
    model = Sparse(width)
    if kind != PLAIN:
        options = RawIds() if kind == MEMORY else RawIds(folder=folder)
        tables = nn.ModuleList()
        for plain in model.tables:
            table, ids = RawTable(width, options), torch.arange(len(plain.weight))
            table.put(Records(ids, torch.ones_like(ids), torch.ones_like(ids)), plain.weight.detach())
            tables.append(table)
        model.tables = tables
    return replicate(model, adagrad)


def held(model: Any) -> Iterator[torch.Tensor]:
    """Yield the rows of the tables, and their optimizer's state, which are in files."""
    for table in model.module.tables:
        yield table.weight.detach()
        yield model.optimizer.state[table.weight]["sum"]


def page_out(model: Any) -> None:
    """Write the pages of the files, and take them out of memory."""
    os.sync()
    for tensor in held(model):
        if ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), _PAGE_OUT):
            raise OSError("madvise failed")


def measured(width: int, rows: int, steps: int, turns: int, folder: str) -> dict[str, list[tuple[float, float]]]:
    """In a rank: the seconds of each turn, and its last loss, by contestant."""
    models = {kind: made(kind, width, folder) for kind in (PLAIN, MEMORY, FILES, COLD)}
    batches = list(rows_for(steps, rows))
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in models}
    for turn in range(turns + 1):
        for kind, model in models.items():
            if kind == COLD and turn:
                page_out(model)
            elif kind == FILES and turn:
                for tensor in held(model):
                    tensor.sum()  # reads all pages
            dist.barrier()
            began = time.perf_counter()
            for batch in batches:
                model.optimizer.zero_grad()
                loss = log_loss(*predict_sparse(model.model, batch))
                loss.backward()
                model.optimizer.step()
            dist.barrier()
            if turn:  # the first makes the optimizers' state
                found[kind].append((time.perf_counter() - began, float(loss.detach())))
    return found


def lines_of(width: int, ranks: int, found: dict[str, list[tuple[float, float]]], work: int) -> list[str]:
    """Rows for one width and number of ranks; ends the program where the contestants' losses differ."""
    losses = {kind: turns[0][1] for kind, turns in found.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3:  # the sums of gradients have another order
        sys.exit(f"not the same training: {losses}")
    lines = []
    for kind, turns in found.items():
        ratios = [plain / own for (plain, _), (own, _) in zip(found[PLAIN], turns, strict=True)]
        speed = work / statistics.median(seconds for seconds, _ in turns)
        lines.append(f"| {width} | {ranks} | {kind} | {speed:,.0f} | {spread(ratios)} |")
    return lines


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--rows", type=int, default=4096, help="rows per step over all ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="of the files, on a disk; the default is that of temporary files")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    lines = [
        f"The same model, Adagrad, {options.rows:,} rows a step over all ranks, one thread a rank; {options.turns} "
        f"turns of {options.steps} steps, in which all take turns. Ratios are of a turn, with their spread. All begin "
        "with the same rows, and have the same loss after two turns. With no page in memory, the first use of a row "
        "in a turn reads 4 KiB for it, and 4 KiB for its optimizer's state.",
        "",
        "| numbers of a row | ranks | tables | rows/s | of tables in memory |",
        "|---:|---:|---|---:|---:|",
    ]
    run = functools.partial(measured, rows=options.rows, steps=options.steps, turns=options.turns)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for ranks in options.ranks:
            with Session(ranks, devices="cpu", threads=1) as session:
                for width in WIDTHS:
                    found = session.run(run, width, folder=folder)
                    lines += lines_of(width, ranks, found, options.rows * options.steps)
                    print("\n".join(lines[-len(found) :]), flush=True)
    about = f"Tables of {' and '.join(f'{rows:,} {name}s' for name, rows in TABLES.items())}. "
    lines[0] = about + lines[0]
    save_section("training", "Tables in files", [*lines, "", *conditions(["torch"])], keep=not options.print)


if __name__ == "__main__":
    main()

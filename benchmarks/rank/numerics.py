"""Costs of `check="nan"` and `check="ranks"`: steps of a click model of notebook 05's size, each check in turn."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.machine import conditions, save
from nbdist import Session
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit

#: Rows of a batch on each of two ranks, and of the tables, as notebook 05 has them of ML-100k.
BATCH, TABLES = 1024, {"user": 944, "movie": 1683}
#: The part of a step that a check may cost.
TARGET = 0.02


class Click(nn.Module):
    """The model of notebook 05, its tables in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(size, 16) for name, size in TABLES.items()})
        self.genres = nn.EmbeddingBag(19, 16)
        self.dense = nn.Sequential(
            nn.Linear(48, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(128, 1),
        )

    def forward(self, batch: Any) -> torch.Tensor:
        ids = [table(batch[name]) for name, table in self.tables.items()]
        return self.dense(torch.cat([*ids, self.genres(batch["genres"])], 1)).squeeze(1)  # type: ignore[no-any-return]


def table(rows: int) -> dict[str, torch.Tensor]:
    """Rows to train on."""
    ids = {name: torch.randint(size, (rows,)) for name, size in TABLES.items()}
    return {**ids, "genres": torch.randint(19, (rows, 3)), "label": torch.rand(rows) > 0.5}


def by_fit(steps: int) -> float:
    """Milliseconds of CPU time of a step of `fit`, on rank 0."""
    model = replicate(Click(), lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    rows = MemoryLoader(table(90_000), BATCH, shuffle=True, seed=1)
    begin = time.process_time()
    fit(model, lambda model, batch: (model(batch), batch["label"]), rows, steps=steps, progress=False)
    return 1000 * (time.process_time() - begin) / steps


def by_hand(steps: int) -> float:
    """Milliseconds of CPU time of a step of a plain loop under DistributedDataParallel, on rank 0."""
    model = nn.parallel.DistributedDataParallel(Click())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = table(BATCH)
    begin = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"].float())
        loss.backward()
        optimizer.step()
    return 1000 * (time.process_time() - begin) / steps


LOOPS: dict[str, Callable[[int], float]] = {"`fit`": by_fit, "a plain loop under DDP": by_hand}
CHECKS: dict[str, Any] = {"none": None, "nan": "nan", "ranks": "ranks"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each, in turn")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    sessions = {name: Session(2, devices="cpu", check=check) for name, check in CHECKS.items()}
    for number in range(options.rounds + 1):
        for loop, fn in LOOPS.items():
            for name, session in sessions.items():
                took = session.run(fn, options.steps)
                if number:  # the first is slower
                    found.setdefault((loop, name), []).append(took)
    for session in sessions.values():
        session.close()
    lines = [
        "# What the checks of numbers cost",
        "",
        f"CPU time of a step on rank 0, with all its threads: a click model of notebook 05's size, 2 CPU ranks, "
        f"{BATCH:,} rows a batch on each; medians of {options.rounds} runs of {options.steps} steps, in turn. The part "
        f"is the median of the ratios to the run without a check beside it, with their quartiles; that of `nan` may be "
        f"{TARGET:.0%}.",
        "",
        "| loop | check | CPU ms a step | part | quartiles |",
        "|---|---|--:|--:|--:|",
    ]
    for (loop, name), took in found.items():
        parts = [a / b - 1 for a, b in zip(took, found[loop, "none"], strict=True)]
        low, middle, high = statistics.quantiles(parts, n=4)
        part = " | " if name == "none" else f"{middle:+.1%} | {low:+.1%} to {high:+.1%}"
        lines.append(f"| {loop} | {name} | {statistics.median(took):.3f} | {part} |")
    save("numerics", [*lines, "", *conditions(("torch",))], keep=not options.print)


if __name__ == "__main__":
    main()

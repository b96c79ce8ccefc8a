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
from nbdist.numerics.call import checked
from nbdist.recsys.loader import MemoryLoader
from nbdist.recsys.sharding import replicate
from nbdist.recsys.training import fit, log_loss

#: Rows of a batch on each of two ranks, of the tables, and ids of a list in a row, as notebook 05 has them of ML-100k.
BATCH, TABLES = 1024, {"user": 944, "rated": 1683, "movie": 1683, "raters": 944, "genres": 19}
LISTS = {"rated": 50, "raters": 50, "genres": 2}
#: The part of a step that a check may cost.
TARGET = 0.02


class Click(nn.Module):
    """The model of notebook 05, its tables in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(size, 64) for name, size in TABLES.items()})
        self.above = nn.Parameter(torch.tensor([2.0, 1.0, 0.0, -1.0]))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = {name: bags(batch[name]) for name, bags in self.tables.items()}
        user, movie = vectors["user"] + vectors["rated"], vectors["movie"] + vectors["raters"] + vectors["genres"]
        score = (user[:, 1:] * movie[:, 1:]).sum(1) + user[:, 0] + movie[:, 0]
        squares = sum(vector.square().sum(1) for vector in vectors.values())
        return score[:, None] + self.above, squares  # type: ignore[return-value]


def table(rows: int) -> dict[str, torch.Tensor]:
    """Rows to train on."""
    ids = {name: torch.randint(size, (rows, LISTS.get(name, 1))) for name, size in TABLES.items()}
    return {**ids, "label": torch.rand(rows, 4) > 0.5}


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch."""
    logits, squares = model(batch)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"].float()) + 0.02 * squares.mean()


def by_fit(steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of a step of `fit`, on rank 0, by the check."""
    model = replicate(Click(), lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    rows = MemoryLoader(table(90_000), BATCH, shuffle=True, seed=1)

    def block(check: str) -> float:
        with checked([check] if check else []):
            begin = time.process_time()
            fit(model, predict, rows, steps=steps, loss=LOSSES, progress=False)
            return time.process_time() - begin

    return in_turn(block, steps, rounds)


def predict(model: Any, batch: Any) -> Any:
    logits, squares = model(batch)
    return {"stars": (logits, batch["label"]), "squares": (squares, batch["label"])}


LOSSES = {"stars": log_loss, "squares": lambda squares, _: 0.02 * squares.mean()}


def by_hand(steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of a step of a plain loop under DistributedDataParallel, on rank 0, by the check."""
    model = nn.parallel.DistributedDataParallel(Click())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = table(BATCH)

    def some(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    def block(check: str) -> float:
        with checked([check] if check else []):
            some(5)  # in which a check comes to know the models
            begin = time.process_time()
            some(steps)
            return time.process_time() - begin

    return in_turn(block, steps, rounds)


def in_turn(block: Callable[[str], float], steps: int, rounds: int) -> dict[str, list[float]]:
    """Run blocks of steps with each check in turn, in one process, since two of them may differ by more than a check
    costs."""
    found: dict[str, list[float]] = {check: [] for check in CHECKS}
    for number in range(rounds + 1):
        first = number % len(CHECKS)
        for check in [*CHECKS[first:], *CHECKS[:first]]:
            took = block(check)
            if number:  # the first is slower
                found[check].append(1000 * took / steps)
    return found


LOOPS: dict[str, Callable[[int, int], dict[str, list[float]]]] = {"`fit`": by_fit, "a plain loop under DDP": by_hand}
CHECKS = ("", "nan", "ranks:10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each check, in turn")
    parser.add_argument("--print", action="store_true", help="leave results/ alone")
    options = parser.parse_args()
    with Session(2, devices="cpu", output="none") as session:
        results = {loop: session.run(fn, options.steps, options.rounds) for loop, fn in LOOPS.items()}
    lines = [
        "# What the checks of numbers cost",
        "",
        f"CPU time of a step on rank 0, over all threads: a click model of the size in notebook 05, 2 CPU ranks, "
        f"{BATCH:,} rows in a batch of each rank; medians of {options.rounds} blocks of {options.steps} steps, in turn "
        f"in one process. The cost is the median of the ratios to the block without a check in the same round, minus "
        f"1, with its quartiles. The check `nan` may cost {TARGET:.0%}.",
        "",
        "| loop | check | CPU ms a step | cost | quartiles |",
        "|---|---|--:|--:|--:|",
    ]
    for loop, by_check in results.items():
        for check, took in by_check.items():
            costs = [a / b - 1 for a, b in zip(took, by_check[""], strict=True)]
            low, middle, high = statistics.quantiles(costs, n=4)
            cost = f"{middle:+.1%} | {low:+.1%} to {high:+.1%}" if check else " | "
            lines.append(f"| {loop} | {check or 'none'} | {statistics.median(took):.3f} | {cost} |")
    save("numerics", [*lines, "", *conditions(("torch",))], keep=not options.print)


if __name__ == "__main__":
    main()
